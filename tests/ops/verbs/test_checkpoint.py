"""`dflash checkpoint` returns when the checkpoint is whole, and signals only a trainer that listens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import Exit
from dflash_ops.transport.base import RemoteRefusal
from dflash_ops.verbs.checkpoint import checkpoint
from tests.ops.container import ABSENT, WELL, Container, alive

TRAINER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1]) / "checkpoints" / "step-00000007"
def save(*_):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
if sys.argv[2] == "listens":
    signal.signal(signal.SIGUSR2, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def trainer() -> Iterator[Callable[[Path, str], int]]:
    children: list[subprocess.Popen[str]] = []

    def start(folder: Path, manner: str) -> int:
        argv = [sys.executable, "-c", TRAINER, str(folder), manner]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child.pid

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_checkpoint_returns_when_the_manifest_is_there(
    container: Container, trainer: Callable[[Path, str], int]
) -> None:
    folder = container.run("r1", alive())
    container.units["dflash-r1.service"] = alive(trainer(folder, "listens"))
    answer = checkpoint(container.session(), "r1", 20)
    assert answer.checkpoint.name == "step-00000007"


@pytest.mark.parametrize(
    ("records", "code", "words"),
    [
        ({}, Exit.RUN_LOST, "lost, systemd no longer knows the unit"),
        ({"kill_requested": {"time": 1.0, "by": "ann@laptop", "grace": 45}, "exit": WELL}, Exit.RUN_CANCELLED, "ann"),
        ({"exit": {**WELL, "result": "exit-code", "exit_status": "1"}}, Exit.RUN_FAILED, "failed, exit 1"),
        ({"exit": WELL}, Exit.USAGE, "succeeded"),
    ],
)
def test_a_run_that_ended_is_not_asked_and_said_to_be_what_it_is(
    container: Container, records: dict[str, Any], code: Exit, words: str
) -> None:
    container.run("r1", ABSENT, **records)
    with pytest.raises(RemoteRefusal, match="the run r1 is not running: ") as caught:
        checkpoint(container.session(), "r1", 20)
    assert (caught.value.code, words in caught.value.message) == (code, True)
    assert caught.value.hint == "`dflash status r1` says how it is"


def test_a_trainer_that_would_die_of_the_signal_is_not_sent_it(
    container: Container, trainer: Callable[[Path, str], int]
) -> None:
    folder = container.run("r1", alive())
    pid = trainer(folder, "is deaf")
    container.units["dflash-r1.service"] = alive(pid)
    with pytest.raises(RemoteRefusal, match="does not take requests yet") as caught:
        checkpoint(container.session(), "r1", 20)
    assert caught.value.code == Exit.TEMPORARY
    os.kill(pid, 0)
