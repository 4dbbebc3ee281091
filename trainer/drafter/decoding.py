"""Writes text with a target alone, or with a drafter's help by speculative decoding.

Speculative decoding: the drafter proposes a block, the target reads it in one pass, and a prefix is accepted such that
the text is what the target alone would have written: exactly at temperature 0, in distribution above (rejection
sampling, Leviathan et al. 2023). Accepted lengths are counted as in the official package: per pass of the target, the
tokens it yields, the target's own one included, cut at a stop token and at the length limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.drafter.drafting import Drafting
from trainer.drafter.model import DFlashDrafter
from trainer.target.continuation import TargetState


class DecodingError(ValueError):
    """Tokens that cannot be chosen as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen from logits. Temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise DecodingError("temperature and top-k must not be negative, and top-p must lie above 0 and up to 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return float32 probabilities for logits [T, V] at a temperature above 0."""
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k, dim=-1).values[:, -1:], float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            ordered = ordered * (ordered.cumsum(dim=-1) - ordered < self.top_p)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities


@dataclass(frozen=True, slots=True)
class Generation:
    """A text and how it came about."""

    tokens: list[int]
    """What was written behind the prompt; a stop token is the last."""
    accepted: list[int]
    """Tokens that each pass of the target yielded, beside the first token, which comes with the prompt."""
    seconds: float
    """Time behind the prompt's pass."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a text ends."""

    max_new_tokens: int
    stop: Set[int] = frozenset()


class SpeculativeDecoder:
    """A target and its drafter on one device, in inference."""

    def __init__(self, target: Any, drafter: DFlashDrafter) -> None:
        """Take a transformers causal LM and a drafter made for it, both on the same device and in one precision.

        Raises DrafterConfigError when they do not fit.
        """
        drafter.config.check_target(target.config)
        self._target = target.eval()
        self._drafter = drafter.eval()
        self._embedding: Tensor = target.get_input_embeddings().weight
        self._head: Tensor = target.get_output_embeddings().weight
        self.device = self._embedding.device

    @torch.inference_mode()
    def plain(
        self, prompt: Sequence[int], limits: Limits, sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Write one token per pass of the target."""
        state = TargetState(self._target, ())
        logits, _ = state.read(self._ids(prompt), last_only=True)
        tokens = [int(_choose(logits, sampling, generator))]
        began = _now(self.device)
        while tokens[-1] not in limits.stop and len(tokens) < limits.max_new_tokens:
            logits, _ = state.read(self._ids(tokens[-1:]))
            tokens.append(int(_choose(logits, sampling, generator)))
        return Generation(tokens, [1] * (len(tokens) - 1), _now(self.device) - began)

    @torch.inference_mode()
    def speculative(
        self,
        prompt: Sequence[int],
        limits: Limits,
        sampling: Sampling,
        generator: torch.Generator,
        block_size: int | None = None,
    ) -> Generation:
        """Write a block per pass of the target; `block_size` may be smaller than the drafter was trained with."""
        block_size = block_size or self._drafter.config.block_size
        state = TargetState(self._target, self._drafter.config.target_layer_ids)
        drafting = Drafting(self._drafter)
        logits, features = state.read(self._ids(prompt), last_only=True)
        drafting.extend(features.to(self._embedding.dtype))
        tokens = [int(_choose(logits, sampling, generator))]
        accepted: list[int] = []
        began = _now(self.device)
        while tokens[-1] not in limits.stop and (room := limits.max_new_tokens - len(tokens)) > 0:
            size = min(block_size, room + 1)
            draft, draft_probabilities = self._draft(drafting, tokens[-1], size, sampling, generator)
            logits, features = state.read(torch.cat([self._ids(tokens[-1:]), draft]))
            if sampling.temperature == 0:
                choice = logits.argmax(dim=-1)
                count = int((draft == choice[:-1]).cumprod(0).sum())
                bonus = int(choice[count])
            else:
                probabilities = sampling.probabilities(logits)
                count, bonus = reject(draft, draft_probabilities, probabilities, generator)
            new = [*draft[:count].tolist(), bonus][:room]
            if stops := [i for i, token in enumerate(new) if token in limits.stop]:
                new = new[: stops[0] + 1]
            tokens += new
            accepted.append(len(new))
            state.keep(len(new))
            drafting.extend(features[: len(new)].to(self._embedding.dtype))
        return Generation(tokens, accepted, _now(self.device) - began)

    def _draft(
        self, drafting: Drafting, anchor: int, size: int, sampling: Sampling, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return size - 1 tokens and, where sampled, the probabilities [size - 1, V] they were drawn from."""
        config = self._drafter.config
        block = self._ids([anchor] + [config.mask_token_id] * (size - 1))
        if size == 1:
            return block[1:], torch.empty(0, device=self.device)
        hidden = drafting.denoise(F.embedding(block, self._embedding) * config.input_embedding_scale)[1:]
        logits = F.linear(hidden, self._head) * config.output_multiplier
        if (cap := config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        if sampling.temperature == 0:
            return logits.argmax(dim=-1), logits
        probabilities = sampling.probabilities(logits)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0], probabilities

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self.device)


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return the next token for logits [1, V]."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(sampling.probabilities(logits), 1, generator=generator)


def reject(
    draft: Tensor, draft_probabilities: Tensor, probabilities: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Return how many drafted tokens [D] are accepted and the target's next token.

    A token is accepted with probability min(1, p / q); behind the first rejected one the next token is drawn from the
    positive part of p - q, so that what is written is distributed as the target's own samples.
    """
    target = probabilities[:-1].gather(1, draft[:, None])[:, 0]
    drafted = draft_probabilities.gather(1, draft[:, None])[:, 0] if len(draft) else target
    chance = torch.rand(drafted.shape, generator=generator, device=drafted.device)
    count = int((chance * drafted < target).cumprod(0).sum())
    left = probabilities[count]
    if count < len(draft):
        positive = (left - draft_probabilities[count]).clamp(min=0)
        left = positive if float(positive.sum()) > 0 else left
    return count, int(torch.multinomial(left, 1, generator=generator))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
