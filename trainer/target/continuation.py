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
from trainer.target.trial import disagreement

# By how much of their norm the logits of a right way may part. In float32 hardly. In half precision it grows with the
# depth of the target (0.2 was seen of a right one with 48 random layers, 0.35 to 1.4 of wrong ones): what blocks do is
# compared with what rounding alone does to single tokens, and HALF is always allowed; single tokens are compared
# with WRONG.
EXACT, HALF, ROUNDINGS, WRONG = 0.01, 0.05, 3.0, 0.5
ODD = 23  # tokens of a text: no multiple of the chunks that linear attention cuts it into


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
    text = ODD
    ids = _probe(model, text + 11)

    def single() -> Tensor:
        state = TargetState(model, ())
        state.read(ids[:text], last_only=True)
        return torch.cat([state.read(ids[place : place + 1])[0] for place in range(text, text + 8)])

    def blocks() -> Tensor:
        state = TargetState(model, ())
        state.read(ids[:text], last_only=True)
        first, _ = state.read(ids[text : text + 8])
        state.keep(3)
        second, _ = state.read(ids[text + 3 : text + 11])
        return torch.cat([first, second])

    what = "a block of tokens behind a text"
    whole = _attempt(model, what, lambda: model(input_ids=ids[None], use_cache=False).logits[0])
    rounding = disagreement(_attempt(model, what, single), whole[text : text + 8])
    read = _attempt(model, what, blocks)
    limit = EXACT if _is_exact(model) else max(HALF, ROUNDINGS * rounding)
    parted = max(disagreement(read[:8], whole[text : text + 8]), disagreement(read[8:], whole[text + 3 :]))
    if not parted <= limit:  # nor not a number
        raise TargetError(
            f"{type(model).__name__} reads {what} otherwise than the whole text (its logits differ by {parted:.0%}): "
            "it can be trained for, but transformers cannot check drafts with it"
        )


@torch.inference_mode()
def refuse_wrong_answers(model: Any, batch_size: int) -> None:
    """Raise TargetError unless `generate` writes by the same logits as whole texts have, also in a batch."""
    ids, padding = _probe(model, ODD), 8
    lines, mask = ids[None], torch.ones_like(ids)[None]
    if batch_size > 1:
        lines = torch.stack([ids, torch.cat([torch.zeros_like(ids[:padding]), ids[: ODD - padding]])])
        mask = torch.stack([mask[0], (torch.arange(ODD, device=ids.device) >= padding).long()])
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
    limit = EXACT if _is_exact(model) else WRONG
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
