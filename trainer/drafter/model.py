"""Computes the drafter: the DFlash network, with the layout and parameter names of the released checkpoints.

The target's tapped features are fused once (`fc`, `hidden_norm`) into a context that every layer reads through its own
key and value projections: the same ones that serve the block. Embedding and head belong to the target and stay frozen,
so they are not here. Master weights may be float32 under autocast: norms and RoPE compute in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trainer.drafter.attention import Mask, attend
from trainer.drafter.blocks import Tiles, mask_of_tiles
from trainer.drafter.config import AttentionKind, DrafterConfig, LayerType

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [T, D] float32 each."""
KeyValue = tuple[Tensor, Tensor]
"""Keys (normed and rotated) and values of one layer, [1, kv_heads, T, D] each."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed, in x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Rotary(nn.Module):
    """RoPE tables from the configuration; frequencies and scaling are transformers' own."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        reference = Qwen3RotaryEmbedding(config.to_transformers())
        self.scaling = float(reference.attention_scaling)
        self._exact = reference.inv_freq.detach().clone()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", self._exact.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = self._exact.to(self.inv_freq.device)  # a cast of the model must not round the frequencies
        return self

    def forward(self, positions: Tensor) -> Rotation:
        """Return the tables of positions [T]."""
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [1, heads, T, D] by half-split RoPE, in float32, and return it in x's dtype."""
    cos, sin = rotation
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Block queries over context keys and block keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(hidden, query_width, bias)
        self.k_proj = _linear(hidden, kv_width, bias)
        self.v_proj = _linear(hidden, kv_width, bias)
        self.o_proj = _linear(query_width, hidden, bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.kernel_options: dict[str, int] | None = None
        """flex_attention's tiles, see `attention.kernel_options`"""

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def key_value(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """Return the keys and values of x [T, H]: context or block, the projections are the same."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(0, 1)[None]
        value = self._heads(self.v_proj(x)).transpose(0, 1)[None]
        return rotate(key, rotation), value

    def forward(self, x: Tensor, context: KeyValue, rotation: Rotation, mask: Mask) -> Tensor:
        """Return [Q, H] for x [Q, H]; keys are the context's followed by x's own."""
        query = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(0, 1)[None], rotation)
        key, value = self.key_value(x, rotation)
        key = torch.cat([context[0], key], dim=2)
        value = torch.cat([context[1], value], dim=2)
        attended = attend(query, key, value, mask, self.kernel_options)
        return cast(Tensor, self.o_proj(attended[0].transpose(0, 1).reshape(x.shape[0], -1)))


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size, False)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size, False)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size, False)
        self.act_fn: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Return [Q, H] for x [Q, H]."""
        return cast(Tensor, self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DrafterConfig, layer_type: LayerType) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: KeyValue, rotation: Rotation, mask: Mask) -> Tensor:
        """Return [Q, H] for x [Q, H]."""
        x = x + self.self_attn(self.input_layernorm(x), context, rotation, mask)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class DFlashDrafter(nn.Module):
    """The drafter. `state_dict()` has exactly the released checkpoints' keys."""

    def __init__(self, config: DrafterConfig, *, seed: int | None = 0) -> None:
        """Make a drafter with weights drawn from `seed`; None leaves them unset, for a caller who loads them."""
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = _linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        if seed is not None:
            self._draw_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()

    def fuse(self, features: Tensor) -> Tensor:
        """Return [S, H] for features [S, n*H] of the tapped layers."""
        return cast(Tensor, self.hidden_norm(self.fc(features)))

    def context(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return each layer's context keys and values for features [S, n*H] of the tapped layers at positions [S]."""
        fused = self.fuse(features)
        rotation = self.rotary(positions)
        return [cast(Layer, layer).self_attn.key_value(fused, rotation) for layer in self.layers]

    def denoise(
        self,
        embeds: Tensor,
        positions: Tensor,
        context: Sequence[KeyValue],
        masks: Mapping[LayerType, Mask],
    ) -> Tensor:
        """Return the final hidden states [Q, H] of block slots embedded as embeds [Q, H] at positions [Q]."""
        rotation = self.rotary(positions)
        x = embeds
        for layer, keys_values in zip(self.layers, context, strict=True):
            x = layer(x, keys_values, rotation, masks[cast(Layer, layer).layer_type])
        return cast(Tensor, self.norm(x))

    def forward(
        self,
        embeds: Tensor,
        features: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: Mapping[LayerType, Mask],
    ) -> Tensor:
        """Return hidden [Q, H] for embeds [Q, H], features [S, n*H], positions [S] and [Q]: the training layout."""
        return self.denoise(embeds, block_positions, self.context(features, context_positions), masks)


class Shown(NamedTuple):
    """What the layers of one kind see of a row, as it passes from one compiled function to another."""

    mask: Tiles | Tensor
    """Tiles for flex_attention, or the dense mask"""
    anchors: Tensor
    """[A]"""
    starts: Tensor
    """[A]"""


def layer_over_row(
    layer: Layer,
    x: Tensor,
    fused: Tensor,
    rotations: tuple[Rotation, Rotation],
    shown: Shown,
    block_size: int,
    kind: AttentionKind,
) -> Tensor:
    """Return [A*B, H] for x [A*B, H]: one layer over the blocks of a row whose fused features are [S, H].

    `rotations` are those of the context and of the blocks. All layers of one kind compile to one graph, their weights
    being its inputs: a drafter of five layers compiles as fast as one of one.
    """
    mask = shown.mask
    if isinstance(mask, Tiles):
        visible: Mask = mask_of_tiles(mask, shown.anchors, shown.starts, block_size, fused.shape[0], kind)
    else:
        visible = mask
    context = layer.self_attn.key_value(fused, rotations[0])
    return cast(Tensor, layer(x, context, rotations[1], visible))


def fresh_weights(config: DrafterConfig, head: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the state dict of a drafter to train from scratch through this frozen head [V, H].

    The final norm starts so small that the first logits spread by about one, whatever the length of the head's rows.
    With a norm of ones, SmolLM2's tied head (rows 3.2 long on average) begins at a loss of 55 instead of 20 and spends
    its first ten steps on coming down. Confident logits stay in reach: a hidden state aligned with its token's row
    still scores about the square root of H.
    """
    weights = dict(DFlashDrafter(config, seed=seed).state_dict())
    spread = torch.linalg.vector_norm(head, dim=1, dtype=torch.float32).mean().item() * config.output_multiplier
    weights["norm.weight"] = weights["norm.weight"] / max(1.0, spread)
    return weights


def embed_blocks(tokens: Tensor, embedding: Tensor, scale: float) -> Tensor:
    """Return [A*B, H] for tokens [A, B], from the target's frozen embedding [V, H]."""
    return F.embedding(tokens.reshape(-1), embedding) * scale


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    # nn.Linear would draw from torch's global generator, which threads must not share.
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias))  # type: ignore[no-untyped-call]
