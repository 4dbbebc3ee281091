"""Lets a row's block queries attend to context and blocks, by flex_attention or by a dense mask.

A BlockMask goes to flex_attention, which skips absent tiles and has a backward on CUDA only; a dense boolean mask
goes to scaled_dot_product_attention, which trains anywhere. Both masks come from `trainer.drafter.blocks`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.drafter.blocks import Blocks, dense_mask, flex_mask
from trainer.drafter.config import DrafterConfig, LayerType

Mask = Tensor | BlockMask | None
"""None: every key is visible."""


def build_masks(config: DrafterConfig, blocks: Blocks, seq_len: int, *, flex: bool) -> dict[LayerType, Mask]:
    """Return one mask for each layer type of the drafter."""
    build = flex_mask if flex else dense_mask
    return {layer_type: build(blocks, seq_len, kind) for layer_type, kind in config.kinds.items()}


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Return [1, heads, Q, D] for query [1, heads, Q, D], key and value [1, kv_heads, K, D]; scale is D ** -0.5."""
    if isinstance(mask, BlockMask):
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
