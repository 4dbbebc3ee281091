"""nvidia-smi is asked for a bounded time, and never twice at once."""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ops.remote import gpu as remote_gpu


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi on the path; the test writes what it does."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_nvidia_smi_that_hangs_is_given_up_and_ended(smi: Path, tmp_path: Path) -> None:
    write(smi, f"echo $$ > {tmp_path}/pid; exec sleep 100")
    answer = remote_gpu.ask(str(tmp_path), 1.0)
    assert answer["command"]["state"] == "timeout"
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_while_one_hangs_no_second_one_is_started(smi: Path, tmp_path: Path) -> None:
    write(smi, f"touch {tmp_path}/started")
    with (tmp_path / "gpu.lock").open("w") as lock:
        # A child in a driver call that nothing ends holds the lock beyond the probe that started it.
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = remote_gpu.ask(str(tmp_path), 0.2)
    assert (answer["command"]["state"], answer["command"]["pid"]) == ("busy", 4711)
    assert not (tmp_path / "started").exists()


def test_the_child_itself_holds_the_lock(smi: Path, tmp_path: Path) -> None:
    write(smi, "exec sleep 100")
    held = subprocess.Popen(
        [sys.executable, "-c", f"from dflash_ops.remote import gpu; gpu.ask({str(tmp_path)!r}, 60)"],
    )
    try:
        lock = tmp_path / "gpu.lock"
        while not lock.exists() or not lock.read_bytes().strip():
            assert held.poll() is None
        child = int(lock.read_bytes().split()[0])
        held.kill()
        held.wait()
        assert remote_gpu.ask(str(tmp_path), 0.2)["command"] == pytest.approx(
            {"state": "busy", "pid": child, "seconds": 0}, abs=30
        )
        os.kill(child, 9)
        write(smi, "echo fine")
        assert remote_gpu.ask(str(tmp_path), 10)["command"]["stdout"] == "fine\n"
    finally:
        held.kill()
        held.wait()


def test_twenty_probes_at_once_all_get_an_answer(smi: Path, tmp_path: Path) -> None:
    write(smi, "echo fine")
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: remote_gpu.ask(str(tmp_path), 30)["command"], range(20)))
    assert {answer["state"] for answer in answers} == {"ran"}


def test_without_nvidia_smi_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remote_gpu.ask(str(tmp_path))["command"] == {"state": "missing"}
