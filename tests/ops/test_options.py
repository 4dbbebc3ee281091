"""A question is asked on a terminal only, and completion offers what is known."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from dflash_ops.options import confirm
from dflash_ops.run.last_known import remember
from tests.ops.commands import called, dflash


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
    (folder / "inventory.yaml").write_text("containers: [")
    assert complete("launch", "sm") == []
