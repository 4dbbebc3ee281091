"""Prints Rich renderables: piped output is not wrapped, and foreign text is never parsed as markup."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from dflash_ops.text import is_dumb

_MARKS = {"yes": ("✓", "green"), "no": ("×", "red"), "unknown": ("?", "yellow"), "none": ("–", "dim")}
STATE_STYLES = {
    "starting": "cyan",
    "running": "bold green",
    "busy-quiet": "green",
    "stalled": "bold yellow",
    "stopping": "cyan",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "dim",
    "lost": "red",
    "unknown": "yellow",
}


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """See rich. Where nobody looks at columns, lines end where their text does."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        for line in captured.get().removesuffix("\n").split("\n"):
            print(line.rstrip())

    def on_broken_pipe(self) -> None:
        """The command line ends it, as it does for all that is printed otherwise."""
        raise BrokenPipeError


_UNWRAPPED = 1000


def console() -> Console:
    """Where answers go. Piped output is not wrapped: a line stays a line for grep."""
    width, height = None, None  # Rich asks the terminal
    if not sys.stdout.isatty():
        width = _UNWRAPPED
    elif is_dumb():  # Rich would take it for 80 columns
        width, height = shutil.get_terminal_size((_UNWRAPPED, 25))
    return _Console(highlight=False, markup=False, emoji=False, width=width, height=height)


def mark(answer: str) -> Text:
    """A probe's answer as a glyph."""
    glyph, style = _MARKS[answer]
    return Text(glyph, style=style)
