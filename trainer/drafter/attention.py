"""Lets a row's block queries attend to context and blocks, by flex_attention or by a dense mask.

A BlockMask goes to flex_attention, which skips absent tiles and has a backward on CUDA only; a dense boolean mask
goes to scaled_dot_product_attention, which trains anywhere. Both masks come from `trainer.drafter.blocks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.drafter.blocks import Blocks, dense_mask, flex_mask
from trainer.drafter.config import DrafterConfig, LayerType

Mask = Tensor | BlockMask | None
"""None: every key is visible."""


# Tiles of flex_attention's kernels where torch's own choice was beaten, by compute capability and head width. One H200,
# torch 2.11, 32 query and 8 key heads, 8,192 queries, 16,384 keys: forward 0.517 -> 0.463 ms, backward 1.98 -> 1.77 ms.
_KERNEL_OPTIONS: dict[tuple[int, int, int], dict[str, int]] = {
    (9, 0, 128): {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        "bwd_BLOCK_M1": 64,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 4,
        "bwd_num_stages": 2,
    }
}


def kernel_options(device: torch.device, head_dim: int) -> dict[str, int] | None:
    """Return the tiles for flex_attention on a device; None leaves them to torch. Not for compiled code."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return _KERNEL_OPTIONS.get((major, minor, head_dim))


def build_masks(config: DrafterConfig, blocks: Blocks, seq_len: int, *, flex: bool) -> dict[LayerType, Mask]:
    """Return one mask for each layer type of the drafter."""
    build = flex_mask if flex else dense_mask
    return {layer_type: build(blocks, seq_len, kind) for layer_type, kind in config.kinds.items()}


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: dict[str, int] | None = None) -> Tensor:
    """Return [1, heads, Q, D] for query [1, heads, Q, D], key and value [1, kv_heads, K, D]; scale is D ** -0.5.

    `options` are flex_attention's kernel options; see `kernel_options`.
    """
    if isinstance(mask, BlockMask):
        tiles: Any = options  # torch's own type names every key there is
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=tiles)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
