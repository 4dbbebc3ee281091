"""A record belongs to a commit, names what got worse, and the page shows nothing else than what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import record as module
from benchmarks.gpu import _figures
from benchmarks.record import Figure, Record, fallbacks, newest
from benchmarks.tables import BEGIN, END, PAGE, with_tables


def record(commit: str = "a" * 40, date: str = "2026-11-30", **fields: object) -> Record:
    machine = {
        "gpus": ["NVIDIA H200"], "driver": "580", "torch": "2.11", "triton": "3.6", "transformers": "5.17", "cores": 16,
        "written": date,
    }  # fmt: skip
    return Record(date=date, commit=commit, dirty=False, trainer="hash", machine=machine, **fields)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESULTS", tmp_path)


def test_a_record_is_read_as_it_was_written_and_the_newest_of_another_commit_is_found() -> None:
    first = record("a" * 40, "2026-11-29", figures={"step": Figure(2.0, "ms", "lower")})
    second = record("b" * 40, "2026-11-30")
    for made in (first, second):
        assert Record.read(made.write()) == made
    assert newest() == second
    assert newest(other_than=second.commit) == first


def test_a_figure_that_is_more_than_five_percent_worse_is_named_and_no_other() -> None:
    earlier = record(
        figures={
            "step": Figure(100.0, "ms", "lower"),
            "rate": Figure(100.0, "rows/s", "higher"),
            "near": Figure(100.0, "ms", "lower"),
            "gone": Figure(1.0, "ms", "lower"),
        }
    )
    now = record(
        "b" * 40,
        figures={
            "step": Figure(110.0, "ms", "lower"),
            "rate": Figure(90.0, "rows/s", "higher"),
            "near": Figure(104.0, "ms", "lower"),
            "new": Figure(9.0, "ms", "lower"),
        },
    )
    assert now.compared_with(earlier) == [
        "step: 110 ms, 10 % worse than 100 at aaaaaaaaaaaa",
        "rate: 90 rows/s, 10 % worse than 100 at aaaaaaaaaaaa",
    ]


def test_what_nobody_chose_is_a_fallback_and_what_a_field_allows_is_not() -> None:
    reports = [
        {"worker": "target 0", "note": "its layers run uncompiled", "allowed_by": ""},
        {"worker": "target 1", "note": "its layers are not compiled", "allowed_by": "target.compile: false"},
        {"worker": "drafter 0", "note": "", "allowed_by": ""},
    ]
    assert fallbacks("run", reports) == ["run: target 0: its layers run uncompiled"]


def test_a_target_that_was_not_run_leaves_no_figure_but_its_reason() -> None:
    made = record()
    found = {
        "benchmark": "target",
        "rows_per_second": {"launched": 20.0, "captured, compiled layers": None},
        "not_run": {"captured, compiled layers": "its layers run uncompiled"},
    }
    _figures(made, "target smollm2", found)
    assert made.figures == {"target smollm2, launched": Figure(50.0, "ms/row", "lower")}
    assert made.not_run == {"target smollm2: captured, compiled layers": "its layers run uncompiled"}


def test_the_page_keeps_what_was_written_by_hand_and_shows_each_figure_with_its_commit() -> None:
    made = record(figures={"step": Figure(1.5, "ms", "lower")}, not_run={"two": "one GPU here"})
    page = with_tables(f"above\n{BEGIN}\nold\n{END}\nbelow\n", made)
    assert page.startswith("above\n")
    assert page.endswith("\nbelow\n")
    assert "old" not in page
    for shown in ("`aaaaaaaaaaaa`", "| step | 1.5 | ms |", "| two | not run | one GPU here |", "Fell back: nothing."):
        assert shown in page


def test_the_page_shows_the_newest_record_that_stands_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    latest = newest()
    if latest is None:
        pytest.skip("no record yet")
    assert with_tables(PAGE.read_text(), latest) == PAGE.read_text(), "run `make tables`"
