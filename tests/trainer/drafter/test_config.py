"""The `config.json` of a drafter, as released ones have it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from trainer.drafter.config import AttentionKind, DrafterConfig, DrafterConfigError, build_target_layer_ids

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
    ("layer_types", "causal", "written"),
    [("full_attention", False, None), ("sliding_attention", True, True), ("sliding_attention", None, True)],
)
def test_causality_is_written_where_all_layers_have_it_and_not_where_none_has(
    layer_types: str, causal: bool | None, written: bool | None
) -> None:
    config = DrafterConfig.from_json(QWEN36_27B | {"layer_types": [layer_types] * 5, "is_causal": causal})
    document = config.to_json()
    assert document.get("is_causal") is document["dflash_config"].get("causal") is written
    assert DrafterConfig.from_json(document).kinds == config.kinds


@pytest.mark.parametrize("ids", [[5, 1, 9], [1, 1, 5]])
def test_target_layers_that_engines_would_tap_in_another_order_are_refused(ids: list[int]) -> None:
    with pytest.raises(DrafterConfigError, match="must ascend, each layer once"):
        DrafterConfig.from_json(
            QWEN36_27B | {"target_layer_ids": ids, "dflash_config": {}, "mask_token_id": 3, "block_size": 16}
        )


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


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 100,
}


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
