"""Answers have the width of where they go, and piped ones are not padded."""

from __future__ import annotations

import os
import sys

import pytest

from dflash_ops.show import status as render
from dflash_ops.show import tables
from dflash_ops.show.console import console
from dflash_ops.verbs.runs import runs
from dflash_ops.verbs.status import status
from tests.ops.container import Container, alive


def test_piped_answers_end_where_their_text_does(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", alive())
    render.show_status(status(container.session(), "r1"))
    tables.show_runs(runs(container.session(), 5))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(("columns", "width"), [("132", 132), ("0", 1000)])
def test_a_dumb_terminal_is_as_wide_as_it_says(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda handle: os.terminal_size((0, 0)))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width
