"""A run is one line of the table."""

from __future__ import annotations

import io

from rich.console import Console

from dflash_ops.show import tables
from dflash_ops.verbs.runs import runs
from tests.ops.container import ABSENT, WELL, Container


def test_a_long_reason_is_one_line_of_the_table(container: Container) -> None:
    reason = "FileNotFoundError: /srv/" + "very-long-folder/" * 30
    container.run("r1", ABSENT, exit={**WELL, "result": "exit-code", "exit_status": "1"})
    (container.root / "runs/r1/log").write_text(f"2026-11-30T07:20:00.123Z ERROR main {reason}\n")
    answer = runs(container.session(), 5)
    assert len(answer.runs[0].reason) > 100
    stream = io.StringIO()
    Console(file=stream, width=100).print(tables.runs_table(answer))
    assert len(stream.getvalue().splitlines()) == 2
