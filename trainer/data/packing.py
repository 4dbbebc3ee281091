"""Chooses which documents share a row.

Best fit decreasing. Its result depends on the lengths alone, not on which document has which length; so the layout is
made once, every epoch has the same number of rows, and an epoch only decides which of the equally long documents takes
which place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.data.documents import Int64


@dataclass(frozen=True)
class Layout:
    """Places for documents: place k is that of the k-th longest document."""

    places: Int64
    """[N] places, grouped by row"""
    starts: Int64
    """[rows + 1] row r holds `places[starts[r] : starts[r + 1]]`"""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


def best_fit_decreasing(lengths: Int64, capacity: int, most: int) -> Layout:
    """Pack documents of the given lengths into rows of `capacity` tokens and at most `most` documents.

    A document goes to the fullest row that still has room for it. No document is cut.

    Raises:
        ValueError: a document is longer than a row.
    """
    descending = np.sort(lengths)[::-1]
    if len(descending) and descending[0] > capacity:
        raise ValueError(f"a document of {descending[0]} tokens does not fit into a row of {capacity}")
    row_of = np.empty(len(descending), np.int64)
    filled: list[int] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = (
        0  # bit r is set while a row with r free tokens is open: the best fit is the lowest bit at or above a length
    )
    for place, length in enumerate(descending.tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(filled)
            filled.append(0)
        row_of[place] = row
        filled[row] += 1
        left = room - length
        if left and filled[row] < most:
            by_room[left].append(row)
            rooms |= 1 << left
    starts = np.concatenate([[0], np.cumsum(filled, dtype=np.int64)]).astype(np.int64)
    return Layout(np.argsort(row_of, kind="stable").astype(np.int64), starts)


def share_anchors(candidates: Int64, anchors: int, remainder: int) -> Int64:
    """Split a row's anchors among its documents, [D]: one each, the rest in proportion to their further candidates.

    Every document's share is rounded up or down, so that the sum is exact; `remainder`, drawn uniformly from
    [0, sum(candidates) - D), decides which and makes each share right on average. Where candidates are fewer than
    anchors, every candidate is taken. `anchors` must be at least D.
    """
    total, documents = int(candidates.sum()), len(candidates)
    if total <= anchors:
        return candidates
    cumulated = np.cumsum((candidates - 1) * (anchors - documents)) + remainder
    further = np.diff(cumulated // (total - documents), prepend=remainder // (total - documents))
    return np.asarray(1 + further, np.int64)
