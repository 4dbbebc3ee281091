"""Shows how far a transfer is: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """Is told how far a transfer is, and shows nothing."""

    def total(self, size: int, done: int) -> None:
        """`size` bytes are wanted and `done` of them are here."""

    def file(self, path: str) -> None:
        """This file is next."""

    def advance(self, size: int) -> None:
        """So many bytes more are here."""


class _Bar(Progress):
    """Shows a bar on stderr."""

    def __init__(self, bar: RichProgress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None)

    def total(self, size: int, done: int) -> None:
        self._bar.reset(self._task, total=size, completed=done)

    def file(self, path: str) -> None:
        self._bar.update(self._task, description=path[-40:])

    def advance(self, size: int) -> None:
        self._bar.advance(self._task, size)


@contextmanager
def progress_bar(title: str = "", *, quiet: bool = False) -> Iterator[Progress]:
    """A bar for one transfer, where stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    err = Console(stderr=True, highlight=False, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        yield _Bar(bar, title)
