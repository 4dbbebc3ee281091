"""Drafts blocks while decoding; keeps context keys and values, and extends them by what the target accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.drafter.attention import Mask
from trainer.drafter.blocks import visible
from trainer.drafter.config import AttentionKind
from trainer.drafter.model import DFlashDrafter, KeyValue


class Drafting:
    """A drafter at work on one text.

    The context holds every position before the anchor; block slots are computed anew for each block and never kept.
    Sliding layers keep their whole context too and hide it by the mask: simple, and equal.
    """

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._drafter = drafter
        self._context: list[KeyValue] = []
        self.length = 0
        """Positions in the context; the next anchor stands at this position."""

    def extend(self, features: Tensor) -> None:
        """Append the target's tapped features [T, n*H] of the next T positions."""
        positions = torch.arange(self.length, self.length + features.shape[0], device=features.device)
        new = self._drafter.context(features, positions)
        if self._context:
            pairs = zip(self._context, new, strict=True)
            new = [(torch.cat([k, more_k], 2), torch.cat([v, more_v], 2)) for (k, v), (more_k, more_v) in pairs]
        self._context = new
        self.length += features.shape[0]

    def denoise(self, embeds: Tensor) -> Tensor:
        """Return hidden [B, H] for a block whose anchor and masks are embedded as embeds [B, H]."""
        positions = torch.arange(self.length, self.length + embeds.shape[0], device=embeds.device)
        masks = {layer_type: self._mask(kind, embeds) for layer_type, kind in self._drafter.config.kinds.items()}
        return self._drafter.denoise(embeds, positions, self._context, masks)

    def _mask(self, kind: AttentionKind, embeds: Tensor) -> Mask:
        if kind == AttentionKind(window=None, causal=False):
            return None
        size, device = embeds.shape[0], embeds.device
        query = torch.arange(size, device=device)[:, None]
        key = torch.arange(self.length + size, device=device)[None, :]
        anchor = torch.tensor([self.length], device=device)
        return visible(query, key, anchor, torch.zeros_like(anchor), size, self.length, kind)
