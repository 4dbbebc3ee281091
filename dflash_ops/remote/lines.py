"""Defines what a line of a log is, in the container and on the laptop alike.

A line ends at `\\n` and nowhere else. A progress bar draws itself anew after each `\\r`: of its states only the last
one is shown, as on a terminal.
"""

from __future__ import annotations

import os
from typing import BinaryIO, List

_FARTHEST = 16  # times as much is read as is wanted, for a bar's states take room and are not shown


def last_segment(line: str) -> str:
    """What a terminal would show of a line in which a progress bar drew itself anew after each `\\r`."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def last_lines(stream: BinaryIO, count: int, limit: int) -> List[str]:
    """The last `count` lines of an open file as a terminal shows them, in at most `limit` bytes."""
    size = os.fstat(stream.fileno()).st_size
    window = limit
    while True:
        begin = max(0, size - window)
        rows = os.pread(stream.fileno(), size - begin, begin).split(b"\n")
        if not rows[-1]:
            rows.pop()
        shown = [last_segment(row.decode("utf-8", "backslashreplace")) for row in rows[-count:]]
        room = limit - sum(len(row) for row in shown)
        if begin == 0 or len(rows) > count or room <= 0 or window >= _FARTHEST * limit:
            break
        window *= 4
    return _within(shown, limit)


def _within(lines: List[str], limit: int) -> List[str]:
    """The last of these lines that fit; of a longer one, its end."""
    kept = []
    for line in reversed(lines):
        if limit <= 0:
            break
        kept.append(line[-limit:])
        limit -= len(line) + 1
    return kept[::-1]
