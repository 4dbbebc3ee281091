"""Holds a packed row in the form that a target's forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.rows import Row, RowShape


@dataclass(frozen=True, slots=True)
class TargetInputs:
    """A row as the packed way reads it. With the shape of a whole source, a pass over it can be captured in a graph."""

    input_ids: Tensor
    """[1, S] int64"""
    position_ids: Tensor
    """[1, S] int64"""
    boundaries: Tensor
    """[N + 1] int32: where each of N pieces begins, and S: the documents, then padding, then empty pieces"""
    longest: int
    """No piece has more tokens"""

    @classmethod
    def of(cls, row: Row, shape: RowShape | None = None) -> TargetInputs:
        """A row on the CPU; `boundaries` is as long as any row of the shape needs, or this row if there is none."""
        length = len(row.input_ids)
        documents = spans(row)
        longest = shape.longest if shape is not None else max(end - start for start, end in documents)
        # Padding is cut to the length of documents, for that is how far into a piece the kernel looks.
        starts = [start for start, _ in documents] + list(range(documents[-1][1], length, longest))
        pieces = _pieces(shape) if shape is not None else len(starts)
        boundaries = torch.full((pieces + 1,), length, dtype=torch.int32)
        boundaries[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
        return cls(row.input_ids[None], row.position_ids[None], boundaries, longest)

    @classmethod
    def trial(cls, shape: RowShape, vocab_size: int, device: torch.device) -> TargetInputs:
        """Buffers for any row of a source, filled with made-up documents of the longest length."""
        places = torch.arange(shape.tokens, device=device)
        starts = torch.arange(_pieces(shape) + 1, device=device) * shape.longest
        return cls(
            _probe_tokens(vocab_size, shape.tokens).to(device)[None],
            (places % shape.longest)[None],
            starts.clamp_(max=shape.tokens).to(torch.int32),
            shape.longest,
        )

    @classmethod
    def probe(cls, vocab_size: int, device: torch.device, *lengths: int) -> TargetInputs:
        """Packed made-up documents of these lengths, and an empty piece."""
        starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        return cls(
            _probe_tokens(vocab_size, starts[-1]).to(device)[None],
            torch.cat([torch.arange(length) for length in lengths]).to(device)[None],
            torch.tensor([*starts, starts[-1]], dtype=torch.int32, device=device),
            max(lengths),
        )

    @classmethod
    def unpacked(cls, ids: Tensor) -> TargetInputs:
        """One document a line, [D, L]; what the lines are padded with stands to the right."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).expand(len(ids), -1)
        return cls(ids, positions, torch.tensor([0, length], dtype=torch.int32, device=ids.device), length)

    def copy_(self, other: TargetInputs) -> None:
        """Take over another row of the same shape, without waiting for the device."""
        self.input_ids.copy_(other.input_ids, non_blocking=True)
        self.position_ids.copy_(other.position_ids, non_blocking=True)
        self.boundaries.copy_(other.boundaries, non_blocking=True)

    def numbers(self) -> Tensor:
        """[1, S] int32: the piece that each token belongs to, as the kernels of convolutions want to be told."""
        places = torch.arange(self.input_ids.shape[1], device=self.boundaries.device)
        return (torch.searchsorted(self.boundaries, places, right=True, out_int32=True) - 1)[None]

    def to(self, device: torch.device) -> TargetInputs:
        """The same on a device."""
        return TargetInputs(
            self.input_ids.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.boundaries.to(device, non_blocking=True),
            self.longest,
        )


def _probe_tokens(vocab_size: int, count: int) -> Tensor:
    """Distinct-looking token ids spread over the vocabulary, without any random generator."""
    return (torch.arange(1, count + 1) * 7919) % vocab_size


def spans(row: Row) -> list[tuple[int, int]]:
    """Half-open spans of the row's documents, padding left out."""
    starts = torch.unique_consecutive(row.document_start).tolist()
    ends = [*starts[1:], len(row.input_ids)]
    # A padding token is its own document; a real one has at least an anchor and the token behind it.
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end - start > 1]


def _pieces(shape: RowShape) -> int:
    """Pieces that suffice for any row of a shape."""
    return shape.documents + -(-shape.tokens // shape.longest)
