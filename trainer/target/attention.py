"""Keeps attention within the documents of a packed row by torch's variable-length flash kernel."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AttentionInterface

from trainer.pretrained import TargetError

VARLEN = "within_documents"
"""Name under which transformers finds `_varlen_attention`; one with "flash" in it would be taken for its own kernels"""

# While a target is tried out: the window of each call of `_varlen_attention`.
noted_windows: ContextVar[list[int | None] | None] = ContextVar("noted_windows", default=None)

# torch 2.11 takes fewer key heads than query heads without being told; later ones want to be told.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents by torch's flash kernel, in transformers' calling convention.

    query [1, heads, S, d], key and value [1, kv_heads, S, d]; returns [1, S, heads, d]. `s_aux` are attention sinks
    (gpt-oss): a logit per head that takes part in the softmax and attends to nothing.
    """
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise TargetError("the model does not hand the document boundaries to its attention")
    if softcap is not None:
        raise TargetError("the flash kernel has no soft-capped attention")
    if (windows := noted_windows.get()) is not None:
        windows.append(sliding_window)
    output: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        return_aux=AuxRequest(lse=True) if s_aux is not None else None,
        **_GROUPED,
    )
    if s_aux is not None:
        output, logsumexp = output  # [S, heads, d], [heads, S]
        output = output * torch.sigmoid(logsumexp.T - s_aux.float()).to(output.dtype)[..., None]
    return output[None], None


AttentionInterface.register(VARLEN, _varlen_attention)
