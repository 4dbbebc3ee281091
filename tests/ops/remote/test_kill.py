"""A kill is asked for, recorded and confirmed in the container."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.remote import channel, files, process
from dflash_ops.remote import kill as remote_stop
from dflash_ops.transport.base import RemoteRefusal, Unreachable
from dflash_ops.verbs.kill import KillOptions, kill
from dflash_ops.verbs.status import status
from tests.ops.container import ABSENT, Container, alive, ended


def test_a_kill_waits_for_a_launch_that_is_under_way(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = container.run("r1", ABSENT)
    (folder / "started.json").unlink()
    stopped = []

    @contextlib.contextmanager
    def locked(path: str, seconds: float) -> Iterator[None]:
        assert path == str(container.root / "launch.lock")
        container.units["dflash-r1.service"] = alive()  # the launch got through before it let go of its lock
        yield

    def systemctl(*words: str) -> None:
        stopped.append(words)
        container.units["dflash-r1.service"] = ABSENT

    monkeypatch.setattr(files, "locked", locked)
    monkeypatch.setattr(remote_stop, "_systemctl", systemctl)
    assert kill(container.session(), KillOptions("r1")).outcome == "stopped"
    assert stopped


def test_a_run_that_dies_before_it_is_asked_to_stop_keeps_its_reason(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())

    def slow_nvidia_smi(*_: Any) -> None:
        (folder / "exit.json").write_text(json.dumps(ended("exit-code", "exited", "1")))
        container.units["dflash-r1.service"] = {"LoadState": "loaded", "ActiveState": "failed", "Result": "exit-code"}

    monkeypatch.setattr(remote_stop, "_gpu_memory", slow_nvidia_smi)
    monkeypatch.setattr(remote_stop, "_systemctl", lambda *words: pytest.fail("it was asked to stop"))
    answer = kill(container.session(), KillOptions("r1"))
    assert (answer.outcome, answer.verdict.state) == ("already-ended", "failed")
    assert not (folder / "kill-requested.json").exists()


def end_by_itself(container: Container, folder: Path, code: str, status: str, after: float) -> None:
    record = ended("success" if status == "0" else "exit-code", code, status)
    (folder / "exit.json").write_text(json.dumps({**record, "time": time.time() + after}))
    container.units["dflash-r1.service"] = ABSENT


def test_a_stop_that_systemd_refuses_leaves_no_trace_in_the_verdict(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())
    refused = process.Completed(1, "", "Failed to stop: Transaction is destructive.\n", "")
    monkeypatch.setattr(process, "call", lambda *_, **__: refused)
    with pytest.raises(RemoteRefusal, match="did not stop the run r1: Failed to stop") as caught:
        kill(container.session(), KillOptions("r1"))
    assert "systemctl status" in caught.value.hint
    assert status(container.session(), "r1").verdict.state == "running"
    end_by_itself(container, folder, "killed", "KILL", after=10)
    assert status(container.session(), "r1").verdict.state == "failed"


def test_a_stop_for_a_unit_that_just_ended_leaves_its_reason(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())

    def call(*_: Any, **__: Any) -> process.Completed:
        end_by_itself(container, folder, "exited", "1", after=0)
        return process.Completed(5, "", "Failed to stop: Unit not loaded.\n", "")

    monkeypatch.setattr(process, "call", call)
    answer = kill(container.session(), KillOptions("r1", force=True))
    assert (answer.outcome, answer.verdict.state) == ("already-ended", "failed")


@pytest.mark.parametrize("grace", [45, 600])
def test_a_kill_that_dies_before_systemd_is_asked_does_not_claim_a_later_end(
    container: Container, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    folder = container.run("r1", alive())
    with monkeypatch.context() as patch:
        patch.setattr(remote_stop, "_systemctl", lambda *_: (_ for _ in ()).throw(channel.PeerGone))
        with pytest.raises(Unreachable):
            kill(container.session(), KillOptions("r1", grace=grace))
    assert json.loads((folder / "kill-requested.json").read_text())["sent"] is False
    end_by_itself(container, folder, "exited", "0", after=3600)
    assert status(container.session(), "r1").verdict.state == "succeeded"


def test_the_next_kill_is_the_one_that_counts_when_the_first_never_came_through(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())
    lost = {"time": 1.0, "by": "bob@elsewhere", "grace": 45.0, "force": False, "sent": False}
    (folder / "kill-requested.json").write_text(json.dumps(lost))

    monkeypatch.setattr(
        remote_stop, "_systemctl", lambda *words: end_by_itself(container, folder, "exited", "0", after=0)
    )
    answer = kill(container.session(), KillOptions("r1"))
    assert (answer.outcome, answer.verdict.state) == ("stopped", "cancelled")
    assert "bob" not in answer.verdict.reason
