"""Prints a benchmark's tables to stderr; stdout is for the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(stderr=True)


def table(title: str, rows: Sequence[tuple[Any, ...]], *columns: str) -> None:
    """Print a table to stderr; stdout is for the JSON."""
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row))
    console.print(made)
