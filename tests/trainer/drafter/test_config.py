"""Drafter configurations: released files in and out, and new ones from a target."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trainer.config import sections as config_module
from trainer.config.sections import DrafterSection, load
from trainer.drafter.config import (
    AttentionKind,
    DrafterConfig,
    DrafterConfigError,
    build_target_layer_ids,
    choose_mask_token,
)
from trainer.drafter.model import DFlashDrafter
from trainer.drafter.released import fingerprint, read_drafter, write_drafter

QWEN3_8B = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN36_27B = QWEN3_8B | {
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "max_position_embeddings": 262144,
    "num_target_layers": 64,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
del QWEN36_27B["block_size"]
LLAMA = QWEN3_8B | {
    "block_size": 10,
    "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 14, 20, 29]},
    "intermediate_size": 14336,
    "num_target_layers": 32,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
GEMMA = QWEN3_8B | {
    "dflash_config": {
        "final_logit_softcapping": 30.0,
        "input_embedding_scale": 73.32,
        "mask_token_id": 4,
        "target_layer_ids": [1, 12, 23, 35, 46, 57],
    },
    "hidden_size": 5376,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "num_attention_heads": 64,
    "num_target_layers": 60,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 262144,
}
RELEASED = {"Qwen3-8B": QWEN3_8B, "Qwen3.6-27B": QWEN36_27B, "Llama": LLAMA, "Gemma": GEMMA}


@pytest.mark.parametrize("data", RELEASED.values(), ids=RELEASED.keys())
def test_released_configurations_survive_reading_and_writing(data: dict[str, Any]) -> None:
    config = DrafterConfig.from_json(data)
    written = config.to_json()
    assert DrafterConfig.from_json(written) == config
    for key, value in data.items():
        if key == "dflash_config":
            assert value.items() <= written[key].items()
        elif key != "rope_parameters":
            assert written[key] == value, key
    assert written["block_size"] == written["dflash_config"]["block_size"] == config.block_size
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"]


@pytest.mark.parametrize("data", RELEASED.values(), ids=RELEASED.keys())
def test_the_official_package_reads_our_file_as_it_reads_the_released_one(
    official: ModuleType, data: dict[str, Any]
) -> None:
    ours = DrafterConfig.from_json(data).to_json()

    def understood(document: dict[str, Any]) -> dict[str, Any]:
        with torch.device("meta"):
            model = official.DFlashDraftModel(official.Qwen3Config(**document))
        return {
            "shapes": {name: tensor.shape for name, tensor in model.state_dict().items()},
            "layers": [(layer.self_attn.is_causal, layer.self_attn.sliding_window) for layer in model.layers],
            "block": (model.block_size, model.mask_token_id, list(model.target_layer_ids)),
            "rope": (model.config.rope_parameters, model.rotary_emb.attention_scaling),
            "scale": official._draft_value(model.config, "input_embedding_scale", 1.0),
            "softcap": official._draft_value(model.config, "final_logit_softcapping"),
        }

    assert understood(ours) == understood(data)


def test_sliding_layers_are_causal_in_the_block_unless_the_file_says_otherwise() -> None:
    config = DrafterConfig.from_json(QWEN36_27B)
    assert config.kinds == {
        "sliding_attention": AttentionKind(window=2048, causal=True),
        "full_attention": AttentionKind(window=None, causal=False),
    }
    assert "is_causal" not in config.to_json()
    explicit = DrafterConfig.from_json(QWEN36_27B | {"is_causal": False})
    assert explicit.kinds["sliding_attention"] == AttentionKind(window=2048, causal=False)
    written = explicit.to_json()
    assert written["is_causal"] is written["dflash_config"]["causal"] is False


@pytest.mark.parametrize(
    ("layer_types", "causal"), [("full_attention", False), ("sliding_attention", True)], ids=["full", "sliding"]
)
def test_a_causality_that_is_the_rule_is_not_written(layer_types: str, causal: bool) -> None:
    config = DrafterConfig.from_json(QWEN36_27B | {"layer_types": [layer_types] * 5, "is_causal": causal})
    written = config.to_json()
    assert "is_causal" not in written
    assert "causal" not in written["dflash_config"]
    assert DrafterConfig.from_json(written).kinds == config.kinds


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"dflash_config": QWEN3_8B["dflash_config"] | {"conv_kernel_size": 2}}, "DFlash2"),  # type: ignore[operator]
        ({"dflash_config": QWEN3_8B["dflash_config"] | {"projector_type": "domino"}}, "projector_type"),  # type: ignore[operator]
        ({"dflash_config": QWEN3_8B["dflash_config"] | {"sample_from_anchor": True}}, "sample_from_anchor"),  # type: ignore[operator]
        ({"speculators_model_type": "dflash"}, "speculators"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"block_size": None}, "block_size"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_target_layers": 20}, "target_layer_ids"),
        ({"vocab_size": 1000}, "mask_token_id"),
    ],
)
def test_files_that_are_not_a_dflash_drafter_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DrafterConfigError, match=says):
        DrafterConfig.from_json(QWEN3_8B | changes)


def test_target_layers_are_spread_as_officially(official: ModuleType) -> None:
    for layers in (16, 24, 30, 36, 64):
        for count in (1, 2, 5, 8):
            assert build_target_layer_ids(layers, count) == official.build_target_layer_ids(layers, count)
    with pytest.raises(DrafterConfigError, match=r"drafter\.target_layer_ids"):
        build_target_layer_ids(4, 3)


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


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 100,
}


def test_a_target_may_name_several_tokens_that_end_its_text() -> None:
    """As Llama 3.1 does; none of them is taken for the mask, given or found."""
    target = LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=[1, 2])
    names = [f"<|reserved_{i}|>" for i in range(100)]
    config = DrafterConfig.from_section(DrafterSection(num_layers=2), target, Tokenizer(names))
    assert config.mask_token_id == 3
    for taken in (0, 1, 2):
        with pytest.raises(DrafterConfigError, match=f"mask_token_id {taken} is a token"):
            DrafterConfig.from_section(DrafterSection(num_layers=2, mask_token_id=taken), target)


def test_the_last_layer_is_not_tapped_for_others_show_it_only_behind_its_norm() -> None:
    section = DrafterSection(num_layers=2, mask_token_id=99, target_layer_ids=[1, 11])
    with pytest.raises(DrafterConfigError, match=r"\[1, 11\] has the target's last layer.*name layers 0 to 10"):
        DrafterConfig.from_section(section, Qwen3Config(**SIZES))


def test_a_new_drafter_follows_its_target() -> None:
    target = Qwen3Config(**SIZES, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    config = DrafterConfig.from_section(DrafterSection(num_layers=2, mask_token_id=99), target)
    assert config.target_layer_ids == (1, 9)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (32, 2, 160)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    assert config.layer_types == ("full_attention", "full_attention")


EXAMPLES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "qwen3-8b": (
        Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=36,
            vocab_size=151936,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        QWEN3_8B,
    ),
    "qwen3.6-27b": (
        Qwen3_5TextConfig(
            hidden_size=5120,
            intermediate_size=17408,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            num_hidden_layers=64,
            vocab_size=248320,
            max_position_embeddings=262144,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        ),
        QWEN36_27B,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_makes_the_drafter_that_was_released_for_its_target(name: str) -> None:
    target, released = EXAMPLES[name]
    section = load(Path(config_module.__file__).parents[1] / "configs" / f"{name}.yaml").drafter
    assert DrafterConfig.from_section(section, target) == DrafterConfig.from_json(released)


def test_a_sliding_drafter_keeps_its_last_layer_full_unless_told_otherwise() -> None:
    target = Qwen3Config(**SIZES)
    section = DrafterSection(num_layers=3, mask_token_id=99, sliding_window=64)
    assert DrafterConfig.from_section(section, target).layer_types == (
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    )
    none_full = section.model_copy(update={"full_attention_layers": []})
    assert set(DrafterConfig.from_section(none_full, target).layer_types) == {"sliding_attention"}
    beyond = section.model_copy(update={"full_attention_layers": [3]})
    with pytest.raises(DrafterConfigError, match="full_attention_layers"):
        DrafterConfig.from_section(beyond, target)


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
    config = DrafterConfig.from_section(DrafterSection(num_layers=2, mask_token_id=99), target)
    assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == expected


def test_rope_scaling_is_taken_over_where_it_is_fixed_and_the_base_always() -> None:
    section = DrafterSection(num_layers=2, mask_token_id=99)
    scaled = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}  # type: ignore[operator]
    target = LlamaConfig(**SIZES, rope_parameters=scaled)
    assert DrafterConfig.from_section(section, target).rope_parameters == scaled
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
    assert DrafterConfig.from_section(section, target).rope_parameters == {"rope_type": "default", "rope_theta": 3e4}


def test_a_mixture_of_experts_gives_its_drafter_a_dense_mlp_of_three_hidden_sizes() -> None:
    target = Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=32)
    config = DrafterConfig.from_section(DrafterSection(num_layers=2, mask_token_id=99), target)
    assert config.intermediate_size == 192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny drafter on disk, made for a target of `SIZES`."""
    config = DrafterConfig.from_section(DrafterSection(num_layers=2, mask_token_id=99), Qwen3Config(**SIZES))
    write_drafter(tmp_path, config, DFlashDrafter(config, seed=3).state_dict(), torch.float32)
    return tmp_path


def test_a_drafter_read_back_has_the_weights_that_were_written(folder: Path) -> None:
    drafter = read_drafter(folder)
    again = DFlashDrafter(drafter.config, seed=3).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.state_dict().items())


def test_training_continues_from_a_drafter_in_its_own_shape_only(folder: Path) -> None:
    target = Qwen3Config(**SIZES)
    same = DrafterSection(init_from=folder, block_size=16)
    assert DrafterConfig.from_section(same, target) == DrafterConfig.read(folder)
    repeated = same.model_copy(update={"num_layers": 2, "target_layer_ids": [1, 9], "full_attention_layers": [0, 1]})
    assert DrafterConfig.from_section(repeated, target) == DrafterConfig.read(folder)
    for change in ({"block_size": 8}, {"full_attention_layers": [1]}, {"target_layer_ids": [2, 9]}, {"num_layers": 3}):
        (name,) = change
        with pytest.raises(DrafterConfigError, match=rf"drafter\.{name} is .*; leave {name} out"):
            DrafterConfig.from_section(DrafterSection(init_from=folder, **change), target)  # type: ignore[arg-type]
    with pytest.raises(DrafterConfigError, match="made for another target"):
        DrafterConfig.from_section(same, Qwen3Config(**SIZES | {"num_hidden_layers": 13}))


def test_damaged_folders_are_refused_with_the_reason(folder: Path) -> None:
    drafter = read_drafter(folder)
    weights = drafter.state_dict()
    save_file({name: tensor for name, tensor in weights.items() if name != "fc.weight"}, folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=r"lacks fc\.weight"):
        read_drafter(folder)
    save_file(weights | {"lm_head.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=r"has lm_head\.weight"):
        read_drafter(folder)
    save_file(weights | {"norm.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=r"norm\.weight is \[1\]"):
        read_drafter(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DrafterConfigError, match="cannot be read"):
        read_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DrafterConfigError, match=r"config\.json"):
        read_drafter(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DrafterConfigError, match="not a drafter"):
        read_drafter(folder)


def test_sharded_weights_are_read(folder: Path) -> None:
    weights, whole = read_drafter(folder).state_dict(), fingerprint(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_drafter(folder).state_dict().items())
    assert fingerprint(folder) == whole
