"""A run is one line of the table, or a block where the table would cut it."""

from __future__ import annotations

import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from dflash_ops.show import tables
from dflash_ops.verbs.runs import Runs, runs
from tests.ops.container import ABSENT, WELL, Container, alive


def test_a_long_reason_is_one_line_of_the_table(container: Container) -> None:
    reason = "FileNotFoundError: /srv/" + "very-long-folder/" * 30
    container.run("r1", ABSENT, exit={**WELL, "result": "exit-code", "exit_status": "1"})
    (container.root / "runs/r1/log").write_text(f"2026-11-30T07:20:00.123Z ERROR main {reason}\n")
    answer = runs(container.session(), 5)
    assert len(answer.runs[0].reason) > 100
    stream = io.StringIO()
    Console(file=stream, width=100).print(tables.runs_view(answer, 100))
    assert len(stream.getvalue().splitlines()) == 2


def printed(answer: Runs, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(tables.runs_view(answer, width))
    return stream.getvalue()


@pytest.mark.parametrize("width", range(20, 200, 7))
@pytest.mark.parametrize("name", ["r1", "smoke-20261130-072000", "a" * 63])
def test_no_figure_is_cut_at_any_width(container: Container, width: int, name: str) -> None:
    step = {"kind": "step", "step": 372, "total_steps": 1234, "time": 1.0, "loss": 12.345}
    (container.run("r2", alive()) / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (container.run(name, ABSENT, exit={**WELL, "time": 1e9}) / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    text = printed(runs(container.session(), 5), width)
    words = text.split()
    assert words.count("372/1234") == 2
    assert words.count("12.345") == 2
    assert {"running", "succeeded", "✓", "–"} <= set(words)
    assert name in "".join(words)
    assert max(map(cell_len, text.splitlines())) <= width


def test_where_a_table_does_not_fit_each_run_is_a_block_that_keeps_its_reason(container: Container) -> None:
    container.run("r1", ABSENT, exit={**WELL, "result": "exit-code", "exit_status": "1"})
    (container.root / "runs/r1/log").write_text("ValueError: seventeen rows came and sixteen were wanted\n")
    text = printed(runs(container.session(), 5), 50)
    assert text.startswith("r1\n  failed  step 3/20  loss 3.800  age 1m\n  exit 1")
    assert "ValueError: seventeen rows came and sixteen were wanted" in " ".join(text.split())
