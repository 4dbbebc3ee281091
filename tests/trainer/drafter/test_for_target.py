"""New drafters follow their target."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import trainer
from tests.trainer.drafter.test_config import EXAMPLES, LLAMA, SIZES
from trainer.config.load import load
from trainer.config.sections import DrafterSection
from trainer.drafter.config import DrafterConfig, DrafterConfigError
from trainer.drafter.for_target import choose_mask_token, config_for_target


class Tokenizer:
    """As much of a tokenizer as the mask rule reads."""

    def __init__(self, names: list[str], mask_token_id: int | None = None) -> None:
        self.names = names
        self.mask_token_id = mask_token_id

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}


def test_mask_token_is_the_explicit_one_then_the_tokenizers_then_a_free_row_then_a_reserved_token() -> None:
    names = ["<pad>", "<eos>", "<|reserved_0|>", "the", "reserved", "<mask>"]
    assert choose_mask_token(3, Tokenizer(names, 0), 8) == 3
    assert choose_mask_token(None, Tokenizer(names, 0), 8) == 0
    assert choose_mask_token(None, Tokenizer(names), 8) == 5
    assert choose_mask_token(None, Tokenizer(names[:-1]), 8) == 5
    assert choose_mask_token(None, Tokenizer(names[:-1]), 5) == 2
    with pytest.raises(DrafterConfigError, match=r"set drafter\.mask_token_id"):
        choose_mask_token(None, Tokenizer(names[:-1]), 5, in_use=frozenset({2}))
    with pytest.raises(DrafterConfigError, match=r"set drafter\.mask_token_id"):
        choose_mask_token(None, None, 8)
    with pytest.raises(DrafterConfigError, match=r"mask_token_id 1 is a token that the target's text begins or ends"):
        choose_mask_token(1, Tokenizer(names), 8, in_use=frozenset({0, 1}))


def test_a_target_may_name_several_tokens_that_end_its_text() -> None:
    """As Llama 3.1 does; none of them is taken for the mask, given or found."""
    target = LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=[1, 2])
    names = [f"<|reserved_{i}|>" for i in range(100)]
    config = config_for_target(DrafterSection(num_layers=2), target, Tokenizer(names))
    assert config.mask_token_id == 3
    for taken in (0, 1, 2):
        with pytest.raises(DrafterConfigError, match=f"mask_token_id {taken} is a token"):
            config_for_target(DrafterSection(num_layers=2, mask_token_id=taken), target)


def test_the_last_layer_is_not_tapped_for_others_show_it_only_behind_its_norm() -> None:
    section = DrafterSection(num_layers=2, mask_token_id=99, target_layer_ids=[1, 11])
    with pytest.raises(DrafterConfigError, match=r"\[1, 11\] has the target's last layer.*name layers 0 to 10"):
        config_for_target(section, Qwen3Config(**SIZES))


def test_a_new_drafter_follows_its_target() -> None:
    target = Qwen3Config(**SIZES, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    config = config_for_target(DrafterSection(num_layers=2, mask_token_id=99), target)
    assert config.target_layer_ids == (1, 9)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (32, 2, 160)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    assert config.layer_types == ("full_attention", "full_attention")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_makes_the_drafter_that_was_released_for_its_target(name: str) -> None:
    target, released = EXAMPLES[name]
    section = load(Path(trainer.__file__).parent / "configs" / f"{name}.yaml").drafter
    assert config_for_target(section, target) == DrafterConfig.from_json(released)


def test_a_sliding_drafter_keeps_its_last_layer_full_unless_told_otherwise() -> None:
    target = Qwen3Config(**SIZES)
    section = DrafterSection(num_layers=3, mask_token_id=99, sliding_window=64)
    assert config_for_target(section, target).layer_types == (
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    )
    none_full = section.model_copy(update={"full_attention_layers": []})
    assert set(config_for_target(none_full, target).layer_types) == {"sliding_attention"}
    beyond = section.model_copy(update={"full_attention_layers": [3]})
    with pytest.raises(DrafterConfigError, match="full_attention_layers"):
        config_for_target(beyond, target)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Gemma2Config(**SIZES, head_dim=16), (8.0, 1.0, 30.0)),
        (GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=4.0), (12.0, 0.25, None)),
        (CohereConfig(**SIZES, logit_scale=0.0625), (1.0, 0.0625, None)),
        (LlamaConfig(**SIZES), (1.0, 1.0, None)),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_embedding_scale_multiplier_and_softcap_come_from_the_target(
    target: PreTrainedConfig, expected: tuple[float, float, float | None]
) -> None:
    config = config_for_target(DrafterSection(num_layers=2, mask_token_id=99), target)
    assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == expected


def test_rope_scaling_is_taken_over_where_it_is_fixed_and_the_base_always() -> None:
    section = DrafterSection(num_layers=2, mask_token_id=99)
    scaled = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}  # type: ignore[operator]
    target = LlamaConfig(**SIZES, rope_parameters=scaled)
    assert config_for_target(section, target).rope_parameters == scaled
    factors = [1.0] * 8
    long = {
        "rope_type": "longrope",
        "rope_theta": 3e4,
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    }
    target = LlamaConfig(**SIZES, rope_parameters=long)
    assert config_for_target(section, target).rope_parameters == {"rope_type": "default", "rope_theta": 3e4}


def test_a_mixture_of_experts_gives_its_drafter_a_dense_mlp_of_three_hidden_sizes() -> None:
    target = Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=32)
    config = config_for_target(DrafterSection(num_layers=2, mask_token_id=99), target)
    assert config.intermediate_size == 192
