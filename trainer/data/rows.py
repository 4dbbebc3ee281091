"""Makes row n: documents packed to one fixed length, with their anchors, from seed and number alone.

A row is a packed sequence of exactly S tokens with exactly A anchors: the only shape a worker ever sees. `RowSource`
computes row n from (seed, epoch, n) alone, so a resumed run, another process and another node see the same rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trainer.data.documents import DataError, Documents, Int64, Statistics, anchor_candidates
from trainer.data.packing import best_fit_decreasing, share_anchors

_ORDER, _ROW = 0, 1
"""First word of a random stream's key: streams of different uses never coincide."""


@dataclass(frozen=True, slots=True)
class Row:
    """A packed sequence on the CPU. S tokens, A anchors, the same for a whole run."""

    number: int
    """Global sequence number n; goes to drafter n mod M"""
    epoch: int
    input_ids: Tensor
    """[S] int64; 0 on padding, which comes last"""
    position_ids: Tensor
    """[S] int64, from 0 in each document; 0 on padding"""
    document_start: Tensor
    """[S] int64, index of the first token of the token's document; padding tokens: their own index"""
    loss_mask: Tensor
    """[S] bool, supervised tokens; False on padding"""
    anchors: Tensor
    """[A] int64 ascending; padded anchors come last and hold S - 1"""
    anchor_valid: Tensor
    """[A] bool"""


@dataclass(frozen=True, slots=True)
class RowShape:
    """What every row of a source keeps to."""

    tokens: int
    """S"""
    anchors: int
    """A"""
    documents: int
    """Most documents in a row"""
    longest: int
    """Most tokens in a document"""

    def or_larger(self, other: RowShape) -> RowShape:
        """A shape that rows of both sources keep to."""
        documents, longest = max(self.documents, other.documents), max(self.longest, other.longest)
        return RowShape(self.tokens, self.anchors, documents, longest)


class RowSource:
    """Random access to the rows of all epochs. Safe to use from several threads.

    In each epoch every document appears exactly once, whole; order, neighbours and anchors are drawn anew.
    A row's anchors are shared out among its documents (see `share_anchors`), and within a document drawn uniformly
    without replacement, so that short documents are not drowned by long ones.
    """

    def __init__(
        self, documents: Documents, *, sequence_length: int, anchors_per_row: int, epochs: int, seed: int
    ) -> None:
        """Lay out the rows.

        Raises:
            DataError: there is nothing to train on, or a document is longer than a row.
        """
        if not len(documents):
            statistics = documents.statistics
            raise DataError(
                f"none of the {statistics.records} records can be trained on: "
                f"{statistics.unanchored} have no two neighbouring supervised tokens; "
                "chats need a non-empty assistant turn within the greatest document length"
            )
        try:
            self._layout = best_fit_decreasing(documents.lengths, sequence_length, anchors_per_row)
        except ValueError as error:
            raise DataError(f"{error}; lower data.max_document_length") from error
        self._documents = documents
        self._length = sequence_length
        self._anchors = anchors_per_row
        self._epochs = epochs
        self._seed = seed
        self._epoch_order = lru_cache(maxsize=2)(self._draw_epoch_order)

    @property
    def rows_per_epoch(self) -> int:
        """Rows in one epoch, the same in each."""
        return self._layout.rows

    @property
    def total_rows(self) -> int:
        """Rows in all epochs."""
        return self._layout.rows * self._epochs

    @property
    def shape(self) -> RowShape:
        """Sizes that hold for every row of every epoch."""
        most = int(np.diff(self._layout.starts).max())
        return RowShape(self._length, self._anchors, most, int(self._documents.lengths.max()))

    @property
    def statistics(self) -> Statistics:
        """What became of the records of the sources."""
        return self._documents.statistics

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that are not padding."""
        return float(self._documents.lengths.sum() / (self._layout.rows * self._length))

    @property
    def content_hash(self) -> str:
        """Names this sequence of rows: documents, shapes and seed."""
        key = f"{self._documents.content_hash} {self._length} {self._anchors} {self._seed}"
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    def row(self, number: int) -> Row:
        """Row `number`, 0 <= number < total_rows.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= number < self.total_rows:
            raise IndexError(f"row {number} of {self.total_rows}")
        epoch, place = divmod(number, self._layout.rows)
        members = self._members(epoch, place)
        random = _random(self._seed, _ROW, number)
        members = random.permutation(members)  # packing put the longest first

        input_ids = np.zeros(self._length, np.int64)
        position_ids = np.zeros(self._length, np.int64)
        document_start = np.arange(self._length, dtype=np.int64)
        loss_mask = np.zeros(self._length, np.bool_)
        counts = self._documents.candidates[members]
        spare = int(counts.sum()) - len(members)
        shares = share_anchors(counts, self._anchors, int(random.integers(spare)) if spare else 0)
        chosen: list[Int64] = []
        start = 0
        for member, share in zip(members.tolist(), shares.tolist(), strict=True):
            tokens, supervised = self._documents.document(member)
            end = start + len(tokens)
            input_ids[start:end] = tokens
            position_ids[start:end] = np.arange(len(tokens))
            document_start[start:end] = start
            loss_mask[start:end] = supervised
            drawn = random.choice(anchor_candidates(supervised), share, replace=False, shuffle=False)
            chosen.append(start + np.sort(drawn))
            start = end
        found = np.concatenate(chosen)
        anchors = np.full(self._anchors, self._length - 1, np.int64)
        anchors[: len(found)] = found
        return Row(
            number=number,
            epoch=epoch,
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            document_start=torch.from_numpy(document_start),
            loss_mask=torch.from_numpy(loss_mask),
            anchors=torch.from_numpy(anchors),
            anchor_valid=torch.arange(self._anchors) < len(found),
        )

    def documents(self, number: int) -> list[int]:
        """Numbers of the documents in row `number`, ascending; 0 is the first of those that can be trained on."""
        members = self._members(*divmod(number, self._layout.rows)).tolist()
        return sorted(map(self._documents.place, members))

    def _members(self, epoch: int, place: int) -> Int64:
        """Documents of the row at `place` of an epoch."""
        by_length, row_order = self._epoch_order(epoch)
        row = int(row_order[place])
        starts = self._layout.starts
        return by_length[self._layout.places[starts[row] : starts[row + 1]]]

    def _draw_epoch_order(self, epoch: int) -> tuple[Int64, Int64]:
        """Documents by falling length, equal lengths shuffled, [N]; order of the rows, [rows]."""
        random = _random(self._seed, _ORDER, epoch)
        by_length = np.lexsort((random.random(len(self._documents)), -self._documents.lengths))
        return by_length.astype(np.int64), random.permutation(self._layout.rows).astype(np.int64)


def _random(*key: int) -> np.random.Generator:
    """Generator of its own for every use: numpy's global one is never touched."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
