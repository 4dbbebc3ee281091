"""Programs run for real on this machine, through the same stdin and frames as in a container."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dflash_ops.transport.base import (
    ConnectionLost,
    Misconfigured,
    Program,
    Unanswered,
)
from dflash_ops.transport.local import local_transport
from dflash_ops.transport.program import BOOTSTRAP
from tests.ops.local import transport


def test_a_result_comes_back_and_is_counted(tmp_path: Path) -> None:
    way = local_transport()
    assert way.run(Program("env"), {"root": str(tmp_path), "do": "list"}).value == {
        "environments": [],
        "interpreters": {},
    }
    assert way.round_trips == 1


def test_noise_before_and_after_makes_no_difference(tmp_path: Path) -> None:
    way = transport(f"echo Last login: today; echo motd >&2; {BOOTSTRAP}; echo goodbye")
    assert way.run(Program("env"), {"root": str(tmp_path), "do": "list"}).value == {
        "environments": [],
        "interpreters": {},
    }


def test_a_host_that_says_nothing_is_left_at_the_deadline() -> None:
    way = transport("sleep 60")
    begin = time.monotonic()
    with pytest.raises(Unanswered, match=r"within 0\.5 s") as caught:
        way.run(Program("env"), {"root": "/x", "do": "list"}, deadline=0.5)
    assert caught.value.code == 75
    assert time.monotonic() - begin < 30


def test_a_command_that_ends_without_an_answer_is_an_error_whatever_its_exit_code() -> None:
    for code in (0, 1, 2, 127, 255):
        with pytest.raises(ConnectionLost, match=f"exit code {code}") as caught:
            transport(f"echo strange >&2; cat >/dev/null; exit {code}").run(Program("store"), {"root": "/x"})
        assert caught.value.detail == "strange"


def test_no_python_in_the_container_is_a_configuration_error() -> None:
    with pytest.raises(Misconfigured) as caught:
        transport("echo @@DFLASH no-python3").run(Program("store"), {"root": "/x"})
    assert caught.value.code == 78


def test_other_work_is_done_while_a_program_runs(tmp_path: Path) -> None:
    began = tmp_path / "began"
    command = f"touch {began}; exec {BOOTSTRAP}"

    def meanwhile() -> None:
        while not began.exists():
            time.sleep(0.01)

    reply = transport(command).run(
        Program("env"), {"root": str(tmp_path), "do": "list"}, deadline=30, meanwhile=meanwhile
    )
    assert reply.value == {"environments": [], "interpreters": {}}
