"""Shows the progress of long work: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many of `total` units were just finished."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, spoken = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, spoken
        done += count
        if time.monotonic() - spoken >= _SECONDS_BETWEEN_LINES:
            spoken = time.monotonic()
            _log.info("%s: %d of %d (%.0f %%)", label, done, total, 100 * done / max(total, 1))

    yield advance
