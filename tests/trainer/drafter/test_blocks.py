"""Blocks and masks, element by element, against a plain restatement of the rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from trainer.drafter.blocks import TILE, Blocks, dense_mask, flex_mask, make_blocks
from trainer.drafter.config import AttentionKind

MASK_ID = 99
KINDS = [
    AttentionKind(window=None, causal=False),
    AttentionKind(window=None, causal=True),
    AttentionKind(window=3, causal=True),
    AttentionKind(window=40, causal=False),
]


def row_of(lengths: list[int], anchors: list[int], padded: int, block_size: int, supervised: Tensor) -> Blocks:
    """Blocks of a row packed from documents of these lengths; the last `padded` anchors are padding."""
    total = sum(lengths)
    start = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    where = torch.tensor(anchors + [total - 1] * padded)
    valid = torch.tensor([True] * len(anchors) + [False] * padded)
    ids = torch.arange(total) % 90
    return make_blocks(
        ids,
        torch.arange(total) - start,
        start,
        supervised,
        where,
        valid,
        block_size=block_size,
        mask_token_id=MASK_ID,
    )


@st.composite
def rows(draw: st.DrawFn, max_total: int = 60, max_anchors: int = 8) -> tuple[Blocks, int, list[int], Tensor]:
    """A row, its length, the document lengths and the supervised tokens."""
    lengths = draw(st.lists(st.integers(1, max_total // 3), min_size=1, max_size=6))
    total = sum(lengths)
    anchors = sorted(draw(st.sets(st.integers(0, total - 1), max_size=max_anchors)))
    padded = draw(st.integers(0 if anchors else 1, 3))
    block_size = draw(st.integers(2, 10))
    supervised = torch.tensor(draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    return row_of(lengths, anchors, padded, block_size, supervised), total, lengths, supervised


def rule(blocks: Blocks, lengths: list[int], kind: AttentionKind) -> Tensor:
    """The mask as the paper and the released hybrid drafters have it, one element at a time."""
    total = sum(lengths)
    document = [i for i, n in enumerate(lengths) for _ in range(n)]
    count, block_size = blocks.tokens.shape
    mask = torch.zeros(count * block_size, total + count * block_size, dtype=torch.bool)
    for block in range(count):
        anchor = int(blocks.anchors[block])
        for offset in range(block_size):
            row = mask[block * block_size + offset]
            for key in range(anchor):
                near = kind.window is None or anchor + offset - key < kind.window
                row[key] = bool(blocks.valid[block]) and document[key] == document[anchor] and near
            for other in range(block_size):
                seen = not kind.causal or other <= offset
                near = kind.window is None or abs(other - offset) < kind.window
                row[total + block * block_size + other] = seen and near
    return mask


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(drawn=rows())
@settings(deadline=None, max_examples=40)
def test_dense_mask_is_the_rule_for_any_documents_windows_and_padded_anchors(
    drawn: tuple[Blocks, int, list[int], Tensor], kind: AttentionKind
) -> None:
    blocks, total, lengths, _ = drawn
    assert torch.equal(dense_mask(blocks, total, kind), rule(blocks, lengths, kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(drawn=rows(max_total=600, max_anchors=60))
@settings(deadline=None, max_examples=25)
def test_flex_tiles_are_exactly_full_partial_or_absent(
    drawn: tuple[Blocks, int, list[int], Tensor], kind: AttentionKind
) -> None:
    blocks, total, _, _ = drawn
    dense = dense_mask(blocks, total, kind)
    mask = flex_mask(blocks, total, kind)
    queries, keys = dense.shape
    assert mask.shape == (1, 1, queries, keys)
    elements = create_mask(mask.mask_mod, 1, 1, queries, keys, device="cpu")[0, 0]
    assert torch.equal(elements, dense)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for tile_row in range(mask.kv_num_blocks.shape[-1]):
        partial = mask.kv_indices[0, 0, tile_row, : mask.kv_num_blocks[0, 0, tile_row]].tolist()
        full = mask.full_kv_indices[0, 0, tile_row, : mask.full_kv_num_blocks[0, 0, tile_row]].tolist()
        for column in range(-(-keys // TILE)):
            tile = dense[tile_row * TILE : (tile_row + 1) * TILE, column * TILE : (column + 1) * TILE]
            assert (column in full) == bool(tile.all())
            assert (column in partial) == bool(tile.any() and not tile.all())


@given(drawn=rows())
@settings(deadline=None, max_examples=60)
def test_labels_are_the_supervised_tokens_behind_the_anchor_in_its_document_and_row(
    drawn: tuple[Blocks, int, list[int], Tensor],
) -> None:
    blocks, total, lengths, supervised = drawn
    document = [i for i, n in enumerate(lengths) for _ in range(n)]
    count, block_size = blocks.tokens.shape
    for block in range(count):
        anchor = int(blocks.anchors[block])
        assert blocks.tokens[block].tolist() == [anchor % 90] + [MASK_ID] * (block_size - 1)
        reached = bool(blocks.valid[block])
        for slot in range(1, block_size):
            place = anchor + slot
            reached = reached and place < total and document[place] == document[anchor] and bool(supervised[place])
            assert bool(blocks.label_mask[block, slot - 1]) == reached
            if blocks.label_mask[block, slot - 1]:
                assert blocks.labels[block, slot - 1] == place % 90


def test_a_slot_counts_when_its_token_and_all_between_it_and_the_anchor_are_supervised() -> None:
    supervised = torch.tensor([False, False, True, True, False, True, True, True])
    blocks = row_of([8], [2, 5], 1, 4, supervised)
    assert blocks.label_mask.tolist() == [[True, False, False], [True, True, False], [False, False, False]]
    assert blocks.positions.tolist() == [2, 3, 4, 5, 5, 6, 7, 8, 7, 8, 9, 10]
