"""Keeps attention within the documents of a packed row by torch's variable-length flash kernel.

Compiled code runs through `_varlen_attention`: nothing here may be what Dynamo cannot trace (a ContextVar once took the
compiled path from every target). On a CPU a plain reference stands in for the kernel, so that every test machine goes
the same way as a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AttentionInterface

from trainer.pretrained import TargetError

VARLEN = "within_documents"
"""Name under which transformers finds `_varlen_attention`; one with "flash" in it would be taken for its own kernels"""
VARLEN_NOTING = "within_documents_noting"
"""The same for a trial, which notes the window of each call; never compiled"""

_windows: ContextVar[list[int | None]] = ContextVar("windows")

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
    """Causal attention within documents, in transformers' calling convention.

    query [1, heads, S, d], key and value [1, kv_heads, S, d]; returns [1, S, heads, d]. `s_aux` are attention sinks
    (gpt-oss): a logit per head that takes part in the softmax and attends to nothing.
    """
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise TargetError("the model does not hand the document boundaries to its attention")
    if softcap is not None:
        raise TargetError("the flash kernel has no soft-capped attention")
    kernel: Any = varlen_attn if query.is_cuda else varlen_reference
    output = kernel(
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


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    _boundaries_of_keys: Tensor,
    _longest: int,
    _longest_of_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
    return_aux: AuxRequest | None = None,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `varlen_attn` computes for a causal window (left, 0), in plain operations that run on any device.

    query [S, heads, d], key and value [S, kv_heads, d], boundaries [N + 1]; returns [S, heads, d], with `return_aux`
    also the log-sum-exp of the scores [heads, S]. It makes the full score matrix: for tests and small rows.
    """
    length, heads, width = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * (scale if scale is not None else width**-0.5)
    places = torch.arange(length, device=query.device)
    pieces = torch.searchsorted(boundaries, places, right=True)
    behind = places[:, None] - places[None, :]
    seen = (pieces[:, None] == pieces[None, :]) & (behind >= 0)
    if window_size[0] >= 0:
        seen = seen & (behind <= window_size[0])
    scores = scores.masked_fill(~seen, float("-inf"))
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.float()).to(query.dtype)
    return output if return_aux is None else (output, scores.logsumexp(-1))


def _noting_attention(module: nn.Module, *args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    _windows.get().append(sliding_window)
    return _varlen_attention(module, *args, sliding_window=sliding_window, **kwargs)


@contextmanager
def noted_windows() -> Iterator[list[int | None]]:
    """The windows that calls of the `VARLEN_NOTING` attention are told within the context, one for each call."""
    windows: list[int | None] = []
    token = _windows.set(windows)
    try:
        yield windows
    finally:
        _windows.reset(token)


AttentionInterface.register(VARLEN, _varlen_attention)
AttentionInterface.register(VARLEN_NOTING, _noting_attention)
