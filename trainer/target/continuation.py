"""Reads a text in parts with a target, and refuses targets that then say something else than of the whole text.

Decoding goes on behind what the target has read: `evaluate` by blocks, of which a part may be taken back, `regenerate`
by single tokens, for prompts of several lengths side by side. Some models of transformers lose or mix their recurrent
states on the way, without an error. As for packed rows, an experiment at load time finds out, not a list of names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.pretrained import TargetError
from trainer.target.inputs import TargetInputs
from trainer.target.trial import LAYER_TOLERANCE, TOLERANCE, disagreement

# Logits of a right way part by this much at most. In half precision it depends on the depth of the target, so single
# tokens, which every model reads right, say how much rounding alone does.
EXACT, ROUNDINGS = 0.01, 4.0


class TargetState:
    """What the target has read so far, with the last reading revocable."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self._model = model
        self._layer_ids = layer_ids
        cache: Any = DynamicCache
        self._cache = cache(config=model.config)
        self._cache.activate_past_recording()
        # transformers renames the argument: 5.17 knows only the second name, from 5.40 only the first is left.
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._length = 0
        self._last = torch.empty(0, dtype=torch.long)
        self._saved: dict[int, Any] = {}

    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Read ids [T]; returns logits [T or 1, V] and the tapped features [T, n*H]."""
        if self._length:
            self._cache.crop(0)  # layers with a window drop what the last reading no longer needs
            # Recurrent states cannot be cropped, only put back.
            self._saved = {
                number: copy.deepcopy(layer)
                for number, layer in enumerate(self._cache.layers)
                if not layer.is_croppable
            }
        output = self._forward(ids, last_only)
        self._last = ids
        features = [output.hidden_states[number + 1][0] for number in self._layer_ids]
        return output.logits[0], torch.cat(features, dim=-1) if features else output.logits[0, :, :0]

    def keep(self, count: int) -> None:
        """Forget all but the first `count` tokens of the last reading."""
        surplus = len(self._last) - count
        if surplus == 0:
            return
        self._length -= surplus
        if not self._saved:
            self._cache.crop(-surplus)
            return
        for number, layer in enumerate(self._cache.layers):
            if number in self._saved:
                self._cache.layers[number] = self._saved[number]
            else:
                layer.crop(-len(self._last))
        self._length -= count
        self._forward(self._last[:count], last_only=True)

    def _forward(self, ids: Tensor, last_only: bool) -> Any:
        positions = torch.arange(self._length, self._length + len(ids), device=ids.device)
        self._length += len(ids)
        return self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            **{self._cache_name: self._cache},
            use_cache=True,
            output_hidden_states=bool(self._layer_ids),
            logits_to_keep=1 if last_only else 0,
        )


@torch.inference_mode()
def refuse_wrong_blocks(model: Any) -> None:
    """Raise TargetError unless blocks of tokens can be read behind a text, and in part be taken back."""
    ids = _probe(model, 24 + 16)

    def single() -> Tensor:
        state = TargetState(model, ())
        state.read(ids[:24], last_only=True)
        return torch.cat([state.read(ids[place : place + 1])[0] for place in range(24, 32)])

    def blocks() -> Tensor:
        state = TargetState(model, ())
        state.read(ids[:24], last_only=True)
        first, _ = state.read(ids[24:32])
        state.keep(3)
        second, _ = state.read(ids[27:35])
        return torch.cat([first, second])

    what = "a block of tokens behind a text"
    whole = _attempt(model, what, lambda: model(input_ids=ids[None], use_cache=False).logits[0])
    rounding = disagreement(_attempt(model, what, single), whole[24:32])
    read = _attempt(model, what, blocks)
    limit = EXACT if _is_exact(model) else max(LAYER_TOLERANCE, min(ROUNDINGS * rounding, TOLERANCE))
    parted = max(disagreement(read[:8], whole[24:32]), disagreement(read[8:], whole[27:35]))
    if not parted <= limit:  # nor not a number
        raise TargetError(
            f"{type(model).__name__} reads {what} otherwise than the whole text (its logits differ by {parted:.0%}): "
            "it can be trained for, but transformers cannot check drafts with it"
        )


@torch.inference_mode()
def refuse_wrong_answers(model: Any, batch_size: int) -> None:
    """Raise TargetError unless `generate` writes by the same logits as whole texts have, also in a batch."""
    ids, padding = _probe(model, 24), 8
    lines, mask = ids[None], torch.ones_like(ids)[None]
    if batch_size > 1:
        lines = torch.stack([ids, torch.cat([torch.zeros_like(ids[:padding]), ids[: 24 - padding]])])
        mask = torch.stack([mask[0], (torch.arange(24, device=ids.device) >= padding).long()])
    options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "pad_token_id": 0}

    def generate() -> tuple[Tensor, Tensor]:
        output = model.generate(
            input_ids=lines,
            attention_mask=mask,
            max_new_tokens=4,
            min_new_tokens=4,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        return output.sequences, torch.stack(output.logits, dim=1)

    sequences, logits = _attempt(model, "a text token by token", generate)
    limit = EXACT if _is_exact(model) else TOLERANCE
    for number, start in enumerate((0, padding)[: len(lines)]):
        whole = model(input_ids=sequences[number : number + 1, start:], use_cache=False).logits[0, -5:-1]
        parted = disagreement(logits[number], whole)
        if not parted <= limit:  # nor not a number
            cure = "give --batch-size 1" if number else "transformers cannot write answers with it"
            how = "a prompt beside a longer one" if number else "a text token by token"
            raise TargetError(
                f"{type(model).__name__} reads {how} otherwise than by itself (its logits differ by {parted:.0%}): "
                f"{cure}"
            )


def _is_exact(model: Any) -> bool:
    return bool(model.get_input_embeddings().weight.dtype == torch.float32)  # logits are often cast


def _probe(model: Any, count: int) -> Tensor:
    vocab_size = int(model.config.get_text_config().vocab_size)
    return TargetInputs.probe(vocab_size, model.get_input_embeddings().weight.device, count).input_ids[0]


def _attempt(model: Any, what: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise TargetError(
            f"{type(model).__name__} cannot read {what} in transformers ({type(error).__name__}: {reason}): it can be "
            "trained for, but decoding needs that"
        ) from error
