"""Speculative decoding: the target's own text, and the accepted lengths that the official package counts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from trainer.config import DrafterSection, ObjectiveConfig
from trainer.decoding import DecodingError, Limits, Sampling, Writer, reject
from trainer.drafter.attention import build_masks
from trainer.drafter.blocks import make_blocks
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import DFlashDrafter, embed_blocks
from trainer.objective import chunk_gradient, slot_weights

# The official package passes the cache under its older name.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

VOCAB = 60
PROMPT = [3, 14, 15, 9, 2, 6]
GREEDY = Sampling()
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"sliding_window": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def tiny_target(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "gpt_oss" else None).eval()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def drafter_for(target: Any, **section: Any) -> DFlashDrafter:
    settings = DrafterSection(
        **{"num_layers": 2, "block_size": 6, "target_layer_ids": [1, 3], "mask_token_id": VOCAB - 1} | section
    )
    return DFlashDrafter(DrafterConfig.from_section(settings, target.config), seed=1)


def overfit(target: Any, drafter: DFlashDrafter, tokens: list[int], steps: int = 60) -> None:
    """Train the drafter on one text, every token of it behind the prompt an anchor."""
    config = drafter.config
    ids = torch.tensor(tokens)
    length = len(tokens)
    positions = torch.arange(length)
    with torch.no_grad():
        states = target(ids[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in config.target_layer_ids], dim=-1)
    anchors = torch.arange(len(PROMPT), length - 1)
    blocks = make_blocks(
        ids,
        positions,
        torch.zeros_like(ids),
        torch.ones(length, dtype=torch.bool),
        anchors,
        torch.ones(len(anchors), dtype=torch.bool),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    masks = build_masks(config, blocks, length, flex=False)
    embedding, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    objective = ObjectiveConfig(weighting="uniform")
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        embeds = embed_blocks(blocks.tokens, embedding, config.input_embedding_scale)
        hidden = drafter(embeds, features, positions, blocks.positions, masks)
        slots = hidden.view(len(anchors), config.block_size, -1)[:, 1:].reshape(-1, config.hidden_size)
        result = chunk_gradient(
            slots.detach(),
            head,
            blocks.labels.flatten(),
            multiplier=config.output_multiplier,
            softcap=config.final_logit_softcapping,
        )
        weights = slot_weights(result.nll.view_as(blocks.labels), blocks.label_mask, objective).reshape(-1, 1)
        slots.backward(result.gradient * weights / weights.sum())
        optimizer.step()


def official_twin(official: ModuleType, drafter: DFlashDrafter) -> Any:
    twin = official.DFlashDraftModel(official.Qwen3Config(**drafter.config.to_json("float32"))).eval()
    twin.load_state_dict(drafter.state_dict())
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets_own_whatever_the_drafter_proposes(family: str) -> None:
    target = tiny_target(family)
    drafter = drafter_for(target)
    writer = Writer(target, drafter)
    limits = Limits(24)
    alone = writer.plain(PROMPT, limits, GREEDY, generator())
    expected = target.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert alone.tokens == expected[0, len(PROMPT) :].tolist()
    untrained = writer.speculative(PROMPT, limits, GREEDY, generator())
    assert untrained.tokens == alone.tokens
    overfit(target, drafter, PROMPT + alone.tokens)
    trained = writer.speculative(PROMPT, limits, GREEDY, generator())
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
    writer = Writer(target, drafter)
    text = writer.plain(PROMPT, Limits(40), GREEDY, generator()).tokens
    overfit(target, drafter, PROMPT + text, steps=25)
    twin = official_twin(official, drafter)
    stop = text[33]
    for limit, stops in ((40, []), (40, [stop]), (7, []), (1, []), (2, [])):
        expected = official.dflash_generate(
            twin, target, torch.tensor([PROMPT]), limit, stops or None, return_stats=True
        )
        ours = writer.speculative(PROMPT, Limits(limit, frozenset(stops)), GREEDY, generator())
        assert ours.accepted == expected.acceptance_lengths
        assert ours.tokens == expected.output_ids[0, len(PROMPT) :].tolist()


def test_a_smaller_block_than_trained_may_be_served(official: ModuleType) -> None:
    target = tiny_target("qwen3")
    drafter = drafter_for(target)
    expected = official.dflash_generate(
        official_twin(official, drafter), target, torch.tensor([PROMPT]), 20, None, block_size=3, return_stats=True
    )
    ours = Writer(target, drafter).speculative(PROMPT, Limits(20), GREEDY, generator(), block_size=3)
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
    writer = Writer(target, drafter)
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20)
    first, second = (writer.speculative(PROMPT, Limits(20), sampling, generator()) for _ in range(2))
    assert first.tokens == second.tokens
    cold = Sampling(temperature=1e-4)  # practically greedy, by the sampling code
    greedy = writer.plain(PROMPT, Limits(20), GREEDY, generator()).tokens
    overfit(target, drafter, PROMPT + greedy, steps=150)
    sampled = writer.speculative(PROMPT, Limits(20), cold, generator())
    assert sampled.tokens == greedy
    assert sampled.accepted == writer.speculative(PROMPT, Limits(20), GREEDY, generator()).accepted


def test_sampling_probabilities_are_the_official_ones(official: ModuleType) -> None:
    logits = torch.randn(5, VOCAB, generator=generator())
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 7), (0.9, 0.6, 9)):
        ours = Sampling(temperature, top_p, top_k).probabilities(logits)
        torch.testing.assert_close(ours, official._sampling_probs(logits, temperature, top_p, top_k))


def test_impossible_settings_are_refused_in_words() -> None:
    for values in ((-1.0, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.5, 0), (1.0, 1.0, -1)):
        with pytest.raises(DecodingError, match="temperature"):
            Sampling(*values)
    target = tiny_target("llama")
    drafter = drafter_for(target, target_layer_ids=[1, 5])
    with pytest.raises(DecodingError, match="last layer"):
        Writer(target, drafter)
