"""Prints a benchmark's tables to stderr; stdout is for the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer import wording
from trainer.compilation.report import CompileReport

console = Console(stderr=True)


def ran_as(reports: Sequence[CompileReport | Mapping[str, Any]]) -> list[str]:
    """One line for each worker: what it ran as, and what it went without; for the head of a table."""
    lines = []
    for each in reports:
        report = each if isinstance(each, CompileReport) else CompileReport.from_document(each)
        got = report.mode if report.mode == "eager" else f"{report.mode}, {wording.count(report.kernels, 'kernel')}"
        if report.mode == "graph" and not report.compiled:
            got = "graph, not compiled"
        lines.append(f"ran as: {report.worker} {got}" + (f" ({report.fallback})" if report.note else ""))
    return lines


def table(title: str, rows: Sequence[tuple[Any, ...]], *columns: str) -> None:
    """Print a table to stderr; stdout is for the JSON. A value of None is shown as not run."""
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    console.print(made)


def _cell(value: object) -> str:
    if value is None:
        return "not run"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
