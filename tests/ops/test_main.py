"""Every path of `dflash` ends in one sentence and a documented exit code."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import typer

from dflash_ops.errors import DflashError
from tests.ops.commands import called, dflash, exit_code


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
        (["kill", "--container", "here"], 102),
        (["exec", "--container", "here", "none", "--", "true"], 102),
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
        (["kill", "-y", "--container", "here"], 102),
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


def test_set_without_its_option_is_told_how_to_give_it(folder: Path) -> None:
    for words in (["launch", "smoke", "--set", "a=1", "b=2"], ["launch", "--set", "a=1", "b=2"]):
        done = dflash(folder, *words)
        assert done.returncode == 2
        assert "give --set before each" in done.stderr
    assert done.stderr.count("\n") == 2


def test_hostile_text_in_an_error_cannot_reach_the_terminal(folder: Path) -> None:
    done = dflash(folder, "launch", "\x1b]0;title\x07evil\x1b[2J")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr


def test_hostile_text_cannot_reach_the_terminal_by_a_traceback_either(folder: Path) -> None:
    done = dflash(folder, "--debug", "launch", "\x1b]0;title\x07evil\x1b[2J")
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr
