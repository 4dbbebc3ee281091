"""Processes find each other, begin alike, or say in a sentence why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.trainer.exchange.test_reduce import CPU
from tests.trainer.launching import CONTEXT
from tests.trainer.pipeline import tiny
from trainer.exchange.peers import SetupError
from trainer.exchange.reduce import Group
from trainer.exchange.rendezvous import Processes, digest
from trainer.pipeline.types import PipelineError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "mine", "theirs"), [("start step", 3, 5), ("rows", "abc", "abd"), ("total steps", 9, None)]
)
def test_processes_that_begin_apart_are_refused_in_one_sentence(name: str, mine: Any, theirs: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = (
        "import json, sys\n"
        "from trainer.exchange.rendezvous import Processes\n"
        "from trainer.exchange.peers import SetupError\n"
        "try:\n"
        "    Processes.rendezvous().agree(json.loads(sys.argv[1]))\n"
        "except SetupError as error:\n"
        "    sys.exit(str(error))\n"
    )
    processes = []
    for rank, value in enumerate((mine, theirs)):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-c", script, json.dumps({"seed": 0, name: value})]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"process 0 has {name} {mine} and process 1 has {theirs}: give all of them the same" in said
        assert "Traceback" not in said


def join_and_add_up(rank: int, port: int, attempt: int) -> None:
    """One of two processes that torchrun started for the `attempt`th time; they end without leaving."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    (exchange,) = Group.of(Processes.rendezvous(), [CPU]).exchanges([CPU])
    exchange.connect()
    buffer = torch.ones(3)
    exchange.all_reduce(buffer)
    assert buffer.tolist() == [2.0] * 3
    os._exit(0)


def test_processes_that_torchrun_starts_anew_find_each_other_though_its_store_remembers_the_dead() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        processes = [CONTEXT.Process(target=join_and_add_up, args=(rank, store.port, attempt)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]


def test_a_process_that_does_not_come_to_the_meeting_is_a_failure_and_no_wrong_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.exchange.rendezvous.TIMEOUT", timedelta(seconds=1))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", store.port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(PipelineError, match="another process failed: PeerError: process 1 did not come"):
        tiny.train(tiny.run_config())


def test_a_meeting_point_that_nobody_serves_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.exchange.rendezvous.TIMEOUT", timedelta(seconds=1))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"process 1 of 2 could not meet the others at 127\.0\.0\.1:9"):
        Processes.rendezvous()


def test_a_digest_tells_any_difference_and_nothing_else() -> None:
    a = torch.arange(6, dtype=torch.bfloat16)
    state: dict[str, Any] = {"a": a, "b": {"step": torch.tensor(3), "name": "x"}, "c": torch.ones(0)}
    same = {"c": torch.ones(0), "b": dict(state["b"]), "a": a.clone()}
    assert digest(state) == digest(same)
    for change in (
        {"a": a.float()},
        {"a": a.reshape(2, 3)},
        {"a": a.flip(0)},
        {"b": {"step": torch.tensor(4), "name": "x"}},
        {"b": {"step": torch.tensor(3), "name": "y"}},
        {"d": 1},
    ):
        assert digest({**state, **change}) != digest(state)
