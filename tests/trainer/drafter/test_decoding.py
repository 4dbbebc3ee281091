"""Speculative decoding: the target's own text, and the accepted lengths that the official package counts."""

from __future__ import annotations

from math import inf, nan
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.trainer.tiny_models import FAMILIES, PROMPT, VOCAB, drafter_for, official_twin, overfit, tiny_target
from trainer.drafter.config import DrafterConfig, DrafterConfigError
from trainer.drafter.decoding import DecodingError, Limits, Sampling, SpeculativeDecoder, reject
from trainer.drafter.model import DFlashDrafter

# The official package passes the cache under its older name.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

GREEDY = Sampling()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets_own_whatever_the_drafter_proposes(family: str) -> None:
    target = tiny_target(family)
    drafter = drafter_for(target)
    decoder = SpeculativeDecoder(target, drafter)
    limits = Limits(24)
    alone = decoder.plain(PROMPT, limits, GREEDY, generator())
    expected = target.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert alone.tokens == expected[0, len(PROMPT) :].tolist()
    untrained = decoder.speculative(PROMPT, limits, GREEDY, generator())
    assert untrained.tokens == alone.tokens
    overfit(target, drafter, PROMPT + alone.tokens)
    trained = decoder.speculative(PROMPT, limits, GREEDY, generator())
    assert trained.tokens == alone.tokens
    assert sum(trained.accepted) == len(trained.tokens) - 1
    assert len(trained.accepted) < len(untrained.accepted)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("section", [{}, {"sliding_window": 5}], ids=["full", "hybrid"])
def test_accepted_lengths_are_those_of_the_official_package(
    official: ModuleType, family: str, section: dict[str, Any]
) -> None:
    target = tiny_target(family)
    drafter = drafter_for(target, **section)
    decoder = SpeculativeDecoder(target, drafter)
    text = decoder.plain(PROMPT, Limits(40), GREEDY, generator()).tokens
    overfit(target, drafter, PROMPT + text, steps=25)
    twin = official_twin(official, drafter)
    stop = text[33]
    for limit, stops in ((40, []), (40, [stop]), (7, []), (1, []), (2, [])):
        expected = official.dflash_generate(
            twin, target, torch.tensor([PROMPT]), limit, stops or None, return_stats=True
        )
        ours = decoder.speculative(PROMPT, Limits(limit, frozenset(stops)), GREEDY, generator())
        assert ours.accepted == expected.acceptance_lengths
        assert ours.tokens == expected.output_ids[0, len(PROMPT) :].tolist()


def test_a_smaller_block_than_trained_may_be_served(official: ModuleType) -> None:
    target = tiny_target("qwen3")
    drafter = drafter_for(target)
    expected = official.dflash_generate(
        official_twin(official, drafter), target, torch.tensor([PROMPT]), 20, None, block_size=3, return_stats=True
    )
    ours = SpeculativeDecoder(target, drafter).speculative(PROMPT, Limits(20), GREEDY, generator(), block_size=3)
    assert ours.accepted == expected.acceptance_lengths


def test_rejection_sampling_writes_the_targets_distribution() -> None:
    """Joint frequencies of the tokens that a two-token draft leads to, against the target's exact probabilities."""
    random = torch.Generator().manual_seed(1)
    vocabulary, draws = 4, 20000
    first = torch.rand(1, vocabulary, generator=random).softmax(-1) ** 3
    target = torch.cat([first, torch.rand(2, vocabulary, generator=random) ** 3])
    target = target / target.sum(-1, keepdim=True)
    draft = torch.rand(2, vocabulary, generator=random) ** 3
    draft = draft / draft.sum(-1, keepdim=True)
    seen = torch.zeros(vocabulary)
    behind = torch.zeros(vocabulary)
    for _ in range(draws):
        tokens = torch.multinomial(draft, 1, generator=random)[:, 0]
        count, bonus = reject(tokens, draft, target, random)
        text = [*tokens[:count].tolist(), bonus]
        seen[text[0]] += 1
        if len(text) > 1:
            behind[text[1]] += 1
    torch.testing.assert_close(seen / draws, target[0], atol=0.015, rtol=0)
    torch.testing.assert_close(behind / behind.sum(), target[1], atol=0.02, rtol=0)


def test_sampled_text_follows_the_seed_and_accepts_everything_when_the_drafter_is_certain_and_right() -> None:
    target = tiny_target("llama")
    drafter = drafter_for(target)
    decoder = SpeculativeDecoder(target, drafter)
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20)
    first, second = (decoder.speculative(PROMPT, Limits(20), sampling, generator()) for _ in range(2))
    assert first.tokens == second.tokens
    cold = Sampling(temperature=1e-4)  # practically greedy, by the sampling code
    greedy = decoder.plain(PROMPT, Limits(20), GREEDY, generator()).tokens
    overfit(target, drafter, PROMPT + greedy, steps=150)
    sampled = decoder.speculative(PROMPT, Limits(20), cold, generator())
    assert sampled.tokens == greedy
    assert sampled.accepted == decoder.speculative(PROMPT, Limits(20), GREEDY, generator()).accepted


def test_sampling_probabilities_are_the_official_ones(official: ModuleType) -> None:
    logits = torch.randn(5, VOCAB, generator=generator())
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 7), (0.9, 0.6, 9)):
        ours = Sampling(temperature, top_p, top_k).probabilities(logits)
        torch.testing.assert_close(ours, official._sampling_probs(logits, temperature, top_p, top_k))


def test_impossible_settings_are_refused_in_words() -> None:
    for values in (
        (-1.0, 1.0, 0),
        (nan, 1.0, 0),
        (inf, 1.0, 0),
        (1.0, nan, 0),
        (1.0, 0.0, 0),
        (1.0, 1.5, 0),
        (1.0, 1.0, -1),
    ):
        with pytest.raises(DecodingError, match="temperature"):
            Sampling(*values)


def test_a_drafter_for_another_target_is_refused() -> None:
    drafter = drafter_for(tiny_target("llama"))
    other = DrafterConfig.from_json(drafter.config.to_json() | {"num_target_layers": 7})
    with pytest.raises(DrafterConfigError, match="made for another target: its num_target_layers is 7"):
        SpeculativeDecoder(tiny_target("llama"), DFlashDrafter(other))
