"""Programs run for real on this machine, through the same stdin and frames as in a container."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.transport.base import (
    ConnectionLost,
    Deadline,
    Misconfigured,
    Program,
    RemoteRefusal,
    Unanswered,
)
from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.local import LocalHost, local_transport
from dflash_ops.transport.program import BOOTSTRAP


def transport(command: str = BOOTSTRAP) -> FramedTransport:
    return FramedTransport(LocalHost(), command, lambda text, status: None)


def make_run(root: Path, env: str = "") -> None:
    """A run that `execute` can work in."""
    run = root / "runs" / "r1"
    run.mkdir(parents=True)
    (root / "releases" / ("a" * 32)).mkdir(parents=True)
    (run / "env").write_text(env)
    (run / "spec.json").write_text(json.dumps({"release": "a" * 32, "python": "/usr/bin/python3"}))


def execute(root: Path, *argv: str) -> Iterator[Any]:
    return transport().stream(Program("exec"), {"root": str(root), "run": "r1", "argv": list(argv)})


def test_a_result_comes_back_and_is_counted(tmp_path: Path) -> None:
    way = local_transport()
    assert way.run(Program("env"), {"root": str(tmp_path), "do": "list"}).value == {
        "environments": [],
        "interpreters": {},
    }
    assert way.round_trips == 1


def test_arguments_of_any_shape_arrive_unchanged(tmp_path: Path) -> None:
    nasty = [
        "a b",
        "'",
        '"',
        "$HOME",
        "`id`",
        "$(id)",
        "%n",
        "\\",
        "\n",
        "\t\r",
        "",
        "--",
        "-x",
        "*",
        "é日😀",
        "=ls",
        "!1",
    ]
    make_run(tmp_path)
    *events, result = execute(tmp_path, "python3", "-c", "import sys,json;print(json.dumps(sys.argv[1:]))", *nasty)
    out = b"".join(frame.value["data"] for frame in events)
    assert json.loads(out) == nasty
    assert result.value == {"run": "r1", "status": 0}


def test_megabytes_on_both_outputs_at_once_do_not_block_each_other(tmp_path: Path) -> None:
    make_run(tmp_path)
    script = "import sys\nfor _ in range(40):\n sys.stdout.write('o'*65536); sys.stderr.write('e'*65536)"
    sizes = {"out": 0, "err": 0}
    for frame in execute(tmp_path, "python3", "-c", script):
        if frame.kind == "event":
            sizes[frame.value["to"]] += len(frame.value["data"])
    assert sizes == {"out": 40 * 65536, "err": 40 * 65536}


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


def test_a_program_past_its_time_ends_itself(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    make_run(tmp_path)
    (tmp_path / "runs/r1/spec.json").unlink()
    os.mkfifo(tmp_path / "runs/r1/spec.json")  # opening it blocks for ever
    way = transport()
    request = {"root": str(tmp_path), "run": "r1", "argv": ["true"]}
    with pytest.raises(RemoteRefusal, match="did not finish `exec` within 1 s") as caught:
        way.run(Program("exec"), request, deadline=1.9)
    assert caught.value.code == 75


def test_a_refusal_carries_code_sentence_cure_and_reason(tmp_path: Path) -> None:
    with pytest.raises(RemoteRefusal) as caught:
        transport().run(Program("exec"), {"root": str(tmp_path), "run": "nosuch", "argv": ["true"]})
    assert (caught.value.code, caught.value.reason) == (102, "no-run")
    assert "nosuch" in caught.value.message
    assert caught.value.hint


def test_a_crash_in_a_program_shows_its_place_only_as_detail(tmp_path: Path) -> None:
    with pytest.raises(RemoteRefusal) as caught:
        transport().run(Program("env"), {"root": str(tmp_path)})
    assert caught.value.code == 70
    assert "KeyError" in caught.value.message
    assert "dflash_ops/remote/env.py" in caught.value.detail


def test_a_full_or_missing_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "releases").write_text("not a folder")
    request = {"root": str(tmp_path), "shelf": "releases", "name": "e" * 32, "files": []}
    with pytest.raises(RemoteRefusal) as caught:
        transport().run(Program("store"), request)
    assert caught.value.code == 78


def test_closing_a_stream_ends_the_program_and_what_it_runs(tmp_path: Path) -> None:
    make_run(tmp_path)
    frames = execute(tmp_path, "sh", "-c", f"echo $$ > {tmp_path}/pid; echo ready; exec sleep 300")
    next(frames)
    pid = int((tmp_path / "pid").read_text())
    frames.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_no_python_in_the_container_is_a_configuration_error() -> None:
    with pytest.raises(Misconfigured) as caught:
        transport("echo @@DFLASH no-python3").run(Program("store"), {"root": "/x"})
    assert caught.value.code == 78


def test_a_deadline_counts_from_its_last_renewal() -> None:
    deadline = Deadline(1000)
    deadline._end -= 999.5
    assert deadline.remaining() < 1
    deadline.renew()
    assert deadline.remaining() > 999


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
