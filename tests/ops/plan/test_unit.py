"""The unit's command line holds nothing of the user's; its scripts are run here by the shells that will run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.plan.unit import base_environment, entry_script, env_file, on_exit_script, systemd_run_argv
from dflash_ops.run.record import ExitRecord, RunPaths

PATHS = RunPaths(PurePosixPath("/var/lib/dflash/runs/r1"))
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))


def test_the_unit_is_plain_and_its_words_need_no_quoting() -> None:
    argv = systemd_run_argv("r1", PATHS, 900)
    assert argv[0] == "systemd-run"
    assert "--unit=dflash-r1.service" in argv
    assert "--service-type=exec" in argv
    assert "KillMode=mixed" in argv
    assert "WatchdogSec=900" in argv
    assert argv[-1] == "/var/lib/dflash/runs/r1/entry"
    assert not {"--collect", "RemainAfterExit=yes"} & set(argv)
    assert all(re.fullmatch(r"[A-Za-z0-9._/=:+ -]+", word) for word in argv)


def test_without_a_watchdog_there_is_none() -> None:
    assert not any("Watchdog" in word for word in systemd_run_argv("r1", PATHS, None))


def shells() -> list[str]:
    return [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


@pytest.mark.parametrize("shell", shells())
def test_the_entry_becomes_the_interpreter_in_the_release(tmp_path: Path, shell: str) -> None:
    odd = tmp_path / "odd 'name' $HOME \"q\""
    release = tmp_path / "release"
    for folder in (odd, release):
        folder.mkdir()
    python = odd / "python"
    python.write_text('#!/bin/sh\necho "$$"; pwd; echo "$TOKEN"; for word; do echo "<$word>"; done\n')
    python.chmod(0o755)
    paths = RunPaths(PurePosixPath(tmp_path))
    Path(paths.env).write_text(env_file({"TOKEN": "it's $HOME `x`"}, {}))
    script = tmp_path / "entry"
    script.write_text(entry_script(paths, str(release), str(python), resume_from="/runs/old"))
    command = [shell, "sh", str(script)] if shell == "busybox" else [shell, str(script)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid, where, token, *words = child.communicate(timeout=30)[0].splitlines()
    assert int(pid) == child.pid, "the trainer is not the unit's main process"
    assert where == str(release)
    assert token == "it's $HOME `x`"
    config = f"<{paths.config}>"
    assert words == ["<-u>", "<-m>", "<trainer>", "<run>", config, "<--run-dir>", f"<{tmp_path}>", *words[7:]]
    assert words[7:] == ["<--resume-from>", "</runs/old>"]


def test_an_entry_whose_release_is_gone_says_so_by_its_code(tmp_path: Path) -> None:
    script = entry_script(RunPaths(PurePosixPath(tmp_path)), str(tmp_path / "gone"), "/usr/bin/python3")
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 120


@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_variables_of_any_content_reach_the_process(values: list[str]) -> None:
    names = [f"V{index}" for index in range(len(values))]
    text = env_file({}, dict(zip(names, values, strict=True)))
    script = f"set -a\n{text}set +a\nexec env -0"
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True, env={"PATH": os.environ["PATH"]})
    found = dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if "=" in item)
    assert [found[name] for name in names] == values


def test_the_job_s_variables_win_over_the_base() -> None:
    base = base_environment("r1", PATHS, "/cache/compile", "/cache")
    assert base["DFLASH_COMPILE_CACHE"] == "/cache/compile"
    text = env_file(base, {"HOME": "/data"})
    assert [line for line in text.splitlines() if line.startswith("HOME=")] == ["HOME=/data"]


def record(folder: Path, shell: list[str], tools: str = "", **variables: str) -> Path:
    """Run the recorder as ExecStopPost would, with a `systemctl` that answers `tools`."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    systemctl = binaries / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho '{tools}'\n")
    systemctl.chmod(0o755)
    logger = binaries / "logger"
    logger.write_text(f"#!/bin/sh\ncat > {folder}/logged\n")
    logger.chmod(0o755)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    script = folder / "on-exit"
    script.write_text(on_exit_script("r1", RunPaths(PurePosixPath(run))))
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", **variables}
    subprocess.run([*shell, str(script)], env=environment, check=False, timeout=30)
    return run / "exit.json"


ENDED = {"SERVICE_RESULT": "exit-code", "EXIT_CODE": "exited", "EXIT_STATUS": "1", "INVOCATION_ID": "ab12"}


@pytest.mark.parametrize("shell", shells())
def test_the_recorder_writes_what_systemd_says(tmp_path: Path, shell: str) -> None:
    command = [shell, "sh"] if shell == "busybox" else [shell]
    path = record(tmp_path, command, "Job=", **ENDED)
    found = ExitRecord.model_validate_json(path.read_text())
    assert (found.result, found.exit_code, found.exit_status) == ("exit-code", "exited", "1")
    assert found.invocation_id == "ab12"
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found.stop_requested is False
    assert found.time > 1_500_000_000
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 in (0o044, 0)
    assert [entry.name for entry in path.parent.iterdir()] == ["exit.json"]


def test_the_recorder_tells_a_stop_that_was_asked_for(tmp_path: Path) -> None:
    found = ExitRecord.model_validate_json(record(tmp_path, ["sh"], "Job=1234", **ENDED).read_text())
    assert found.stop_requested is True


def test_the_recorder_writes_null_when_the_main_process_never_started(tmp_path: Path) -> None:
    path = record(tmp_path, ["sh"], "", SERVICE_RESULT="resources", INVOCATION_ID="ab12")
    found = json.loads(path.read_text())
    assert (found["exit_code"], found["exit_status"]) == (None, None)


def test_hostile_words_cannot_break_the_record(tmp_path: Path) -> None:
    path = record(tmp_path, ["sh"], "", **{**ENDED, "SERVICE_RESULT": '", "x": "$(id)\n'})
    assert json.loads(path.read_text())["result"] == "xid"


def test_a_recorder_that_cannot_write_tells_the_journal(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/exit.json.tmp").mkdir()  # stands for a full disk: nothing can be written there
    path = record(tmp_path, ["sh"], "", **ENDED)
    assert not path.exists()
    assert json.loads((tmp_path / "logged").read_text())["result"] == "exit-code"
