"""Builds the blocks that the drafter learns to predict in a row, and the masks of what each slot may see.

A block is an anchor token followed by masked slots. All blocks of a row are queries at once; keys are the row's S
context positions followed by the A*B block positions. Slot o of a block with anchor a sees

- context position j of the anchor's document with j < a (strictly: at serving time the target has not yet seen the
  anchor), and in sliding layers only j > a + o - window;
- slots o' of its own block: in causal layers o' <= o, and in sliding layers |o - o'| < window;
- nothing else.

`visible` says this once; the dense mask, the flex mask_mod and the tile classification all stand on `_bounds`.
Everything here is device arithmetic of fixed shapes without a host sync, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.drafter.config import AttentionKind

TILE = 128
"""Edge of a flex tile. Row and block lengths need not be multiples of it; where they are, kernels run fastest."""


class Blocks(NamedTuple):
    """The blocks of one row: A anchors, B tokens each."""

    anchors: Tensor
    """[A] int64, ascending; padded anchors come last."""
    starts: Tensor
    """[A] int64: first context position that the block may see; the anchor itself (so: none) when padded."""
    valid: Tensor
    """[A] bool: False for padded anchors."""
    tokens: Tensor
    """[A, B] int64: the anchor's token, then mask tokens."""
    positions: Tensor
    """[A*B] int64: position in the document."""
    labels: Tensor
    """[A, B-1] int64: the token at each slot; 0 where there is none to learn."""
    label_mask: Tensor
    """[A, B-1] bool: slot k counts iff the anchor is valid and row[anchor + 1] to row[anchor + k] are all supervised
    and of the document. Decoding never gets behind a gap: slots there would take weight from those that it reads."""


def make_blocks(
    input_ids: Tensor,
    position_ids: Tensor,
    document_start: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    anchor_valid: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Lay out the blocks of a row. The first four are [S], the next two [A]; see `trainer.data.rows.Row`."""
    length = input_ids.shape[0]
    slots = torch.arange(1, block_size, device=anchors.device)
    where = anchors[:, None] + slots  # [A, B-1]
    inside = where < length
    where = where.clamp(max=length - 1)
    same_document = document_start[where] == document_start[anchors][:, None]
    supervised = anchor_valid[:, None] & inside & same_document & loss_mask[where]
    label_mask = supervised.cumprod(dim=1).bool()
    masked = torch.full_like(where, mask_token_id)
    offsets = torch.arange(block_size, device=anchors.device)
    return Blocks(
        anchors=anchors,
        starts=torch.where(anchor_valid, document_start[anchors], anchors),
        valid=anchor_valid,
        tokens=torch.cat([input_ids[anchors][:, None], masked], dim=1),
        positions=(position_ids[anchors][:, None] + offsets).reshape(-1),
        labels=torch.where(label_mask, input_ids[where], 0),
        label_mask=label_mask,
    )


class _Bounds(NamedTuple):
    """The two key intervals [low, high) that a query sees: one in the context, one in its block."""

    context_low: Tensor
    context_high: Tensor
    block_low: Tensor
    block_high: Tensor


def _bounds(
    query: Tensor, anchors: Tensor, starts: Tensor, block_size: int, seq_len: int, kind: AttentionKind
) -> _Bounds:
    """Return the intervals of the queries with these indices (0 to A*B - 1), shaped as `query`."""
    block = query // block_size
    offset = query - block * block_size
    anchor = anchors[block]
    low, high = starts[block], anchor
    own = seq_len + query - offset  # key index of the block's slot 0
    own_low, own_high = own, own + block_size
    if kind.causal:
        own_high = own + offset + 1
    if kind.window is not None:
        low = torch.maximum(low, anchor + offset - kind.window + 1)
        own_low = torch.maximum(own_low, own + offset - kind.window + 1)
        own_high = torch.minimum(own_high, own + offset + kind.window)
    return _Bounds(low, high, own_low, own_high)


def visible(
    query: Tensor, key: Tensor, anchors: Tensor, starts: Tensor, block_size: int, seq_len: int, kind: AttentionKind
) -> Tensor:
    """Whether queries see keys; index tensors broadcast against each other."""
    b = _bounds(query, anchors, starts, block_size, seq_len, kind)
    return ((key >= b.context_low) & (key < b.context_high)) | ((key >= b.block_low) & (key < b.block_high))


def dense_mask(blocks: Blocks, seq_len: int, kind: AttentionKind) -> Tensor:
    """Return the whole mask, [A*B, S + A*B] bool: what the CPU trains with, and what the flex mask must equal."""
    count, block_size = blocks.tokens.shape
    device = blocks.anchors.device
    query = torch.arange(count * block_size, device=device)[:, None]
    key = torch.arange(seq_len + count * block_size, device=device)[None, :]
    return visible(query, key, blocks.anchors, blocks.starts, block_size, seq_len, kind)


class Tiles(NamedTuple):
    """Which tiles of the mask are partial and which full, as flex_attention reads them; R x C tiles, all int32."""

    partial_keys: tuple[Tensor, Tensor]
    """Of each row of tiles: how many columns [1, 1, R], and which ones first [1, 1, R, C]."""
    full_keys: tuple[Tensor, Tensor]
    partial_queries: tuple[Tensor, Tensor]
    """Of each column of tiles: how many rows [1, 1, C], and which ones first [1, 1, C, R]."""
    full_queries: tuple[Tensor, Tensor]


def flex_tiles(blocks: Blocks, seq_len: int, kind: AttentionKind) -> Tiles:
    """Classify the tiles of the mask by arithmetic on the anchors.

    A tile is full when each of its elements is visible, partial when some are, and absent when none is: exactly, for
    any row length, block size and order of documents. `create_block_mask` would evaluate every element instead.
    """
    count, block_size = blocks.tokens.shape
    queries, keys = count * block_size, seq_len + count * block_size
    device = blocks.anchors.device
    rows, columns = -(-queries // TILE), -(-keys // TILE)

    # The last tile may be ragged; repeating the last query changes neither "any" nor "all" of it.
    query = torch.arange(rows * TILE, device=device).clamp(max=queries - 1)[:, None]
    b = _bounds(query, blocks.anchors, blocks.starts, block_size, seq_len, kind)
    first = torch.arange(columns, device=device)[None, :] * TILE
    end = (first + TILE).clamp(max=keys)

    def touches(low: Tensor, high: Tensor) -> Tensor:
        return (torch.maximum(low, first) < torch.minimum(high, end)).view(rows, TILE, columns)

    def covers(low: Tensor, high: Tensor) -> Tensor:
        return ((low <= first) & (high >= end)).view(rows, TILE, columns)

    some = (touches(b.context_low, b.context_high) | touches(b.block_low, b.block_high)).any(1)
    full = (covers(b.context_low, b.context_high) | covers(b.block_low, b.block_high)).all(1)
    partial = some & ~full
    return Tiles(_listed(partial), _listed(full), _listed(partial.T), _listed(full.T))


def flex_mask(blocks: Blocks, seq_len: int, kind: AttentionKind) -> BlockMask:
    """Return the block-sparse mask for flex_attention."""
    tiles = flex_tiles(blocks, seq_len, kind)
    return mask_of_tiles(tiles, blocks.anchors, blocks.starts, blocks.tokens.shape[1], seq_len, kind)


def mask_of_tiles(
    tiles: Tiles, anchors: Tensor, starts: Tensor, block_size: int, seq_len: int, kind: AttentionKind
) -> BlockMask:
    """Return `flex_mask` of blocks with these `anchors` and `starts` [A], whose tiles are known already."""
    queries = anchors.shape[0] * block_size

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(q, k, anchors, starts, block_size, seq_len, kind)

    return BlockMask(
        (queries, seq_len + queries),
        *tiles.partial_keys,
        *tiles.full_keys,
        *tiles.partial_queries,
        *tiles.full_queries,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [rows, columns] bool into counts [1, 1, rows] and column indices [1, 1, rows, columns], true ones first.

    Counted into place, not sorted: Inductor makes a bitonic sort of 128 by 128 elements of torch.argsort here, and
    Triton took 63 s to compile that one kernel (triton 3.6, target sm_90).
    """
    count = tiles.sum(dim=1, dtype=torch.int32)
    present = tiles.cumsum(dim=1, dtype=torch.int32) - 1
    absent = count[:, None] + (~tiles).cumsum(dim=1, dtype=torch.int32) - 1
    place = torch.where(tiles, present, absent).long()
    column = torch.arange(tiles.shape[1], device=tiles.device, dtype=torch.int32).expand_as(place)
    index = torch.zeros_like(column).scatter(1, place, column)
    return count[None, None], index[None, None].contiguous()
