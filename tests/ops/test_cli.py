"""The command line: what it prints where, its exit codes, and that an error is one sentence."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from dflash_ops.cli import confirm
from dflash_ops.errors import DflashError
from dflash_ops.main import main
from dflash_ops.run.last_known import remember

INVENTORY = """\
hosts:
  main: {address: 127.0.0.1, port: 1, user: nobody, ssh_config: empty, known_hosts: known}
targets:
  far: {host: main, container: 200}
  here: {host: local, root: @root@}
default_target: far
environments: {venv: {python: /opt/venv/bin/python}}
jobs:
  smoke: {config: {a: 1}, source: package, env: {TOKEN: env:CANARY}}
"""
CANARY = "s3cr3t-canary"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inventory.yaml").write_text(INVENTORY.replace("@root@", str(tmp_path / "root")))
    (tmp_path / "empty").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("")
    return tmp_path


def dflash(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml"), **variables}
    command = [sys.executable, "-m", "dflash_ops.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )


def exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The same in this process: a new one takes half a second."""
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("DFLASH_INVENTORY", str(folder / "inventory.yaml"))
    monkeypatch.setattr(sys, "argv", ["dflash", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_an_error_is_one_sentence_and_its_cure_without_a_traceback(folder: Path) -> None:
    done = dflash(folder, "kill", "-y")
    assert done.returncode == 69
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first == "dflash: main (127.0.0.1:1) refused the connection"
    assert second.startswith("  ")


def test_debug_shows_the_traceback_as_well(folder: Path) -> None:
    done = dflash(folder, "--debug", "kill", "-y")
    assert done.returncode == 69
    assert "Traceback" in done.stderr
    assert "dflash: main (127.0.0.1:1) refused the connection" in done.stderr


def test_an_error_under_json_is_a_document(folder: Path) -> None:
    done = dflash(folder, "kill", "-y", "--json")
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["error"]["code"] == done.returncode == 69
    assert "refused" in document["error"]["message"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["kill", "Not A Name", "-y"], 2),
        (["kill"], 69),  # looks before it asks
        (["kill", "--target", "here"], 102),
        (["exec", "--target", "here", "none", "--", "true"], 102),
        (["launch", "--set", "a=1", "b=2", "c=3"], 2),
        (["--version"], 0),
        (["doctor", "here", "-e", "nope"], 2),
        ([], 2),
        (["launch", "nosuch"], 2),
        (["launch", "--wait", "forever"], 2),
        (["launch", "--set", "x"], 2),
        (["launch", "--run", "../x"], 2),
        (["nosuch"], 2),
        (["kill", "-y", "--grace", "nan"], 2),
        (["launch", "--timeout", "inf"], 2),
        (["wait", "--timeout", "nan"], 2),
        (["trust", "nosuch"], 2),
        (["kill", "-y", "--target", "here"], 102),
        (["env", "build", "venv"], 2),
    ],
)
def test_exit_codes_are_as_documented(
    folder: Path,
    words: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(folder, monkeypatch, *words) == code
    assert "Traceback" not in capsys.readouterr().err


def called(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[], object], name: str = "dflash_ops.verbs.runs.runs"
) -> int:
    """The exit code when the work of `runs` is `verb`."""
    monkeypatch.setattr(name, lambda *_: verb())
    return exit_code(folder, monkeypatch, "runs", "--target", "here")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted: nothing was changed"),
        (typer.Abort(), 130, "interrupted: nothing was changed"),
        (typer.Exit(1), 70, "a fault in dflash itself"),
        (DflashError(1, "odd"), 70, "odd"),
        (OSError(errno.EIO, "odd"), 70, "odd"),
        (BrokenPipeError(), 0, ""),
        (SystemExit(1), 2, ""),
    ],
)
def test_no_path_exits_with_a_code_that_is_not_listed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def raises() -> None:
        raise error

    if isinstance(error, BrokenPipeError):
        monkeypatch.setattr("dflash_ops.cli.no_reader", lambda: None)
    assert called(folder, monkeypatch, raises) == code
    assert words in capsys.readouterr().err


def test_ctrl_c_after_a_key_was_taken_says_where_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = SimpleNamespace(host="main", kind="ssh-ed25519", fingerprint="SHA256:x", known_hosts="/k")
    for taken, words in ((False, "nothing was changed"), (True, "the key of main is in /k")):

        def trust(inventory: object, host: str, ask: Callable[[object], bool], taken: bool = taken) -> None:
            if taken:
                ask(key)
            raise KeyboardInterrupt

        monkeypatch.setattr("dflash_ops.verbs.trust.trust", trust)
        assert exit_code(folder, monkeypatch, "trust", "main", "-y") == 130
        assert capsys.readouterr().err.endswith(f"interrupted: {words}\n")


def test_a_no_is_said_and_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)

    def asks() -> None:
        terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", terminal())
            patch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
            confirm("Really?")

    assert called(folder, monkeypatch, asks) == 0
    assert capsys.readouterr().err == "nothing was done\n"


def test_set_without_its_option_is_told_how_to_give_it(folder: Path) -> None:
    for words in (["launch", "smoke", "--set", "a=1", "b=2"], ["launch", "--set", "a=1", "b=2"]):
        done = dflash(folder, *words)
        assert done.returncode == 2
        assert "give --set before each" in done.stderr
    assert done.stderr.count("\n") == 2


def test_help_names_the_defaults_and_what_may_be_given(folder: Path) -> None:
    launch, pull = (" ".join(dflash(folder, verb, "-h", COLUMNS="80").stdout.split()) for verb in ("launch", "pull"))
    assert "default: the job's" in launch
    assert "[[" not in launch + pull
    assert "checkpoints, metrics, log or all" in pull
    assert dflash(folder).stdout.count("Usage:") == 1
    assert "Value error" not in dflash(folder, "launch", "--wait", "x").stderr
    assert dflash(folder, "--version").stdout.startswith("dflash ")


def test_a_broken_inventory_is_a_configuration_error(folder: Path) -> None:
    (folder / "inventory.yaml").write_text("targets: [")
    done = dflash(folder, "launch")
    assert done.returncode == 78
    assert "inventory.yaml:1" in done.stderr


def test_a_dry_run_shows_all_but_the_secrets_and_connects_to_nothing(folder: Path) -> None:
    for words in (["launch", "--dry-run"], ["launch", "--dry-run", "--json"]):
        done = dflash(folder, *words)
        assert done.returncode == 0, done.stderr
        assert "TOKEN" in done.stdout
        assert CANARY not in done.stdout + done.stderr
        assert "systemd-run" in done.stdout
    assert json.loads(done.stdout)["spec"]["config"] == {"a": 1}


def test_hostile_text_in_an_error_cannot_reach_the_terminal(folder: Path) -> None:
    done = dflash(folder, "launch", "\x1b]0;title\x07evil\x1b[2J")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr


def test_hostile_text_cannot_reach_the_terminal_by_a_traceback_either(folder: Path) -> None:
    done = dflash(folder, "--debug", "launch", "\x1b]0;title\x07evil\x1b[2J")
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_reader_that_has_enough_ends_it_quietly(folder: Path) -> None:
    config = "{" + ", ".join(f"key{index}: {'x' * 100}" for index in range(5000)) + "}"
    text = (folder / "inventory.yaml").read_text().replace("{a: 1}", config)
    (folder / "inventory.yaml").write_text(text)
    command = f"{sys.executable} -m dflash_ops.main launch --dry-run | head -1"
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml")}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("run ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code"), [(["launch", "--dry-run"], 0), (["runs", "--target", "here"], 0), (["kill", "-y", "--json"], 69)]
)
def test_without_a_reader_it_ends_quietly_and_with_its_own_exit_code(folder: Path, words: list[str], code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml")}
    command = [sys.executable, "-m", "dflash_ops.main", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, env=environment, timeout=60)
    os.close(write)
    assert done.returncode == code
    assert b"BrokenPipe" not in done.stderr


def test_closed_streams_change_neither_what_is_done_nor_the_exit_code(folder: Path) -> None:
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml")}
    for verb, code in (("kill -y", 69), ("runs --target here", 0), ("kill", 69)):
        command = f"{sys.executable} -m dflash_ops.main {verb} <&- >&- 2>&-"
        assert subprocess.run(["sh", "-c", command], check=False, env=environment, timeout=60).returncode == code


def test_what_a_terminal_s_encoding_lacks_is_spelled_out(folder: Path) -> None:
    inventory = folder / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace("/opt/venv/bin", "/opt/日/bin"))
    done = dflash(folder, "launch", "--dry-run", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "/opt/\\u65e5/bin/python" in done.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['dflash', '--help']\n"
        "from dflash_ops.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('fabric', 'paramiko', 'pydantic', 'yaml', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_completion_offers_names_of_the_inventory_and_runs_that_were_seen(folder: Path) -> None:
    def complete(*words: str) -> list[str]:
        done = dflash(
            folder,
            _DFLASH_COMPLETE="complete_bash",
            COMP_WORDS=" ".join(("dflash", *words)),
            COMP_CWORD=str(len(words)),
        )
        return done.stdout.split()

    remember(folder / "inventory.yaml", "far", "night-7", "running", "")
    assert complete("kill", "ni") == ["night-7"]
    assert complete("launch", "sm") == ["smoke"]
    assert complete("trust", "") == ["main"]
    (folder / "inventory.yaml").write_text("targets: [")
    assert complete("launch", "sm") == []
