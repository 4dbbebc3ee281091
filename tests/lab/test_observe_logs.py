"""Tests that a followed log loses and repeats nothing when its connection breaks, and leaves the terminal in peace."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.lab.lab import Lab, wait_for
from tests.lab.user import Dflash

pytestmark = pytest.mark.lab


def follow(dflash: Dflash, out: Path, *words: str) -> subprocess.Popen[str]:
    """`dflash tail-logs` in the background, its stdout in a file."""
    with out.open("w") as stream:
        return dflash.start("tail-logs", *words, stdout=stream)


def end(process: subprocess.Popen[str], timeout: float = 60) -> str:
    """What it said on stderr, once it has ended."""
    _, err = process.communicate(timeout=timeout)
    return err


def grown(path: Path, than: int) -> bool | None:
    return path.stat().st_size > than or None


def test_following_survives_cut_connections_without_losing_or_repeating_a_byte(
    lab: Lab, dflash: Dflash, tmp_path: Path
) -> None:
    dflash.launch("busy", pause=0.01)
    out = tmp_path / "out"
    process = follow(dflash, out, "busy", "-n", "1000000")
    for _ in range(2):
        size = out.stat().st_size
        wait_for("the log is followed", lambda size=size: grown(out, size))  # type: ignore[misc]
        lab.stop_sshd(sessions=True)
        lab.start_sshd()
    size = out.stat().st_size
    wait_for("the log is followed again", lambda: grown(out, size))
    dflash("kill", "busy", "-y")
    said = end(process)
    assert process.returncode == 0
    assert out.read_text() == dflash.run_file("busy", "log")
    assert said.count("the connection broke") >= 2
    assert said.splitlines()[-1].startswith("-- run busy cancelled")


def test_the_last_line_of_a_followed_log_is_the_runs_verdict(dflash: Dflash) -> None:
    dflash.launch("dies", "--wait", "none", die="exit", code=3, steps=2)
    answer = dflash("tail-logs", "dies")
    assert "this is the end" in answer.stdout
    assert answer.stderr.splitlines()[-1].startswith("-- run dies failed: exit 3")


def test_ctrl_c_detaches_and_says_so(dflash: Dflash, tmp_path: Path) -> None:
    dflash.launch("goes-on")
    process = follow(dflash, tmp_path / "out", "goes-on")
    wait_for("the log is followed", lambda: grown(tmp_path / "out", 0))
    process.send_signal(signal.SIGINT)
    assert "detached: the run is not affected" in end(process, 15)
    assert process.returncode == 0
    assert dflash.state("goes-on") == "running"


def test_a_reader_that_has_enough_is_no_error(dflash: Dflash) -> None:
    dflash.launch("chatty", lines=20_000)
    process = dflash.start("tail-logs", "chatty", "-n", "100000")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 0


def test_megabytes_of_log_arrive_whole(dflash: Dflash) -> None:
    dflash.launch("long", lines=100_000, steps=1)
    dflash.wait_state("long", "succeeded")
    assert dflash("tail-logs", "long", "--no-follow", "-n", "1000000").stdout == dflash.run_file("long", "log")


def test_a_deleted_log_is_told_and_what_the_run_still_writes_is_shown(dflash: Dflash, tmp_path: Path) -> None:
    dflash.launch("erased")
    out = tmp_path / "out"
    process = follow(dflash, out, "erased")
    wait_for("the log is followed", lambda: grown(out, 0))
    dflash.lab.container("rm", f"{dflash.root}/runs/erased/log")
    size = out.stat().st_size + 500
    wait_for("the deleted log is followed", lambda: grown(out, size))
    dflash("kill", "erased", "-y")
    said = end(process)
    assert "the log was deleted" in said
    assert "done at step" in out.read_text()


def test_a_truncated_log_is_told_and_shown_anew(dflash: Dflash, tmp_path: Path) -> None:
    dflash.launch("cut", quiet=True)
    process = follow(dflash, tmp_path / "out", "cut")
    wait_for("the log is followed", lambda: grown(tmp_path / "out", 0))
    dflash.lab.container("truncate", "-s", "0", f"{dflash.root}/runs/cut/log")
    dflash("kill", "cut", "-y")
    said = end(process)
    assert "the log was truncated" in said
    assert "done at step" in (tmp_path / "out").read_text()


def test_since_and_grep_choose_lines(dflash: Dflash) -> None:
    dflash.launch("chosen", steps=8, pause=0.3)
    dflash.wait_state("chosen", "succeeded")
    stamps = [line.split(" ")[0] for line in dflash.run_file("chosen", "log").splitlines()]
    later = dflash("tail-logs", "chosen", "--no-follow", "--since", stamps[4]).stdout.splitlines()
    assert [line.split(" ")[0] for line in later] == [stamp for stamp in stamps if stamp >= stamps[4]]
    found = dflash("tail-logs", "chosen", "--no-follow", "--grep", r"step \d loss", "-n", "2").stdout
    assert [line.split("step ")[1][0] for line in found.splitlines()] == ["7", "8"]
    dflash("tail-logs", "chosen", "--grep", "(", code=2)
    dflash("tail-logs", "chosen", "--since", "lunch", code=2)


def test_a_log_cannot_steer_the_terminal(dflash: Dflash) -> None:
    dflash.launch("evil", steps=1, text="\x1b]0;owned\x07\x1b[2Jhidden\r visible \x9b31m \u202e")
    dflash.wait_state("evil", "succeeded")
    for words in (("tail-logs", "evil", "--no-follow"), ("status", "evil"), ("status", "evil", "--json")):
        text = dflash(*words).stdout
        for forbidden in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert forbidden not in text


def test_the_log_of_a_container_that_restarts_is_followed_to_its_verdict(
    lab: Lab, dflash: Dflash, tmp_path: Path
) -> None:
    dflash.launch("uprooted")
    process = follow(dflash, tmp_path / "out", "uprooted")
    wait_for("the log is followed", lambda: grown(tmp_path / "out", 0))
    lab.restart_container()
    said = end(process, 90)
    assert said.splitlines()[-1].startswith("-- run uprooted lost")
    assert (tmp_path / "out").read_text() == dflash.run_file("uprooted", "log")
