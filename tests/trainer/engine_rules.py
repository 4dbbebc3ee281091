"""What serving engines demand of a drafter's folder, restated from their public loaders (facts of November 2026).

Each function raises AssertionError for a folder that the engine would refuse or misread, and returns what the engine
would understand, so that a test can compare engines with each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

RELEASED_TENSORS = re.compile(
    r"(fc|hidden_norm|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm"
    r"|self_attn\.(q_proj|k_proj|v_proj|o_proj|q_norm|k_norm)|mlp\.(gate_proj|up_proj|down_proj)))\.weight"
)


@dataclass(frozen=True)
class Understood:
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope_theta: float


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    return tuple(
        config["sliding_window"] if layer_type == "sliding_attention" else None for layer_type in config["layer_types"]
    )


def vllm(config: dict[str, Any]) -> Understood:
    assert config["architectures"] == ["DFlashDraftModel"]
    draft = config["dflash_config"]
    layers = config["num_hidden_layers"]
    assert len(config["layer_types"]) == layers
    for key in ("use_swa", "attention_sink_bias"):
        assert key not in draft
    explicit = config.get("is_causal", draft.get("causal"))
    causal = tuple(
        layer_type == "sliding_attention" if explicit is None else bool(explicit)
        for layer_type in config["layer_types"]
    )
    theta = config["rope_parameters"]["rope_theta"]
    # One token fewer than the block is drafted; layer ids are shifted by one inside the engine.
    return Understood(
        config["block_size"],
        draft["mask_token_id"],
        tuple(sorted(set(draft["target_layer_ids"]))),
        _windows(config),
        causal,
        theta,
    )


def sglang(config: dict[str, Any]) -> Understood:
    draft = config["dflash_config"]
    block = draft.get("block_size", config.get("block_size"))
    assert isinstance(block, int)
    assert block > 1
    ids = draft["target_layer_ids"]
    assert all(isinstance(i, int) and 0 <= i < config["num_target_layers"] for i in ids)
    mask = draft["mask_token_id"]
    assert isinstance(mask, int)
    assert mask >= 0
    assert ("conv_kernel_size" in draft) == ("conv_group_size" in draft) == ("selector_rank" in draft) is False
    assert "projector_type" not in draft
    assert not config["attention_bias"], "biased projections disable the fused path"
    for name in ("output_multiplier", "final_logit_softcapping"):  # read inside dflash_config only
        assert (name in config) <= (name in draft)
    causal = tuple(config.get("is_causal", layer_type == "sliding_attention") for layer_type in config["layer_types"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return Understood(block, mask, tuple(sorted(ids)), _windows(config), causal, theta)


def tensorrt_llm(config: dict[str, Any]) -> Understood:
    draft = config["dflash_config"]
    return Understood(
        config["block_size"],
        draft["mask_token_id"],
        tuple(draft["target_layer_ids"]),
        _windows(config),
        tuple(config.get("is_causal", kind == "sliding_attention") for kind in config["layer_types"]),
        config["rope_theta"],
    )


def llama_cpp(config: dict[str, Any]) -> Understood:
    """Its converter writes one causal flag for all layers, of `is_causal` or `dflash_config.causal` alone."""
    draft = config.get("dflash_config", {})
    causal = bool(config.get("is_causal", draft.get("causal", False)))
    target_layers = [i + 1 for i in draft.get("target_layer_ids", config.get("target_layer_ids"))]
    return Understood(
        draft.get("block_size", config.get("block_size")),
        draft.get("mask_token_id", config.get("mask_token_id")),
        tuple(i - 1 for i in target_layers),
        _windows(config),
        (causal,) * len(config["layer_types"]),
        config["rope_theta"],
    )


def mlx(config: dict[str, Any]) -> Understood:
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        assert isinstance(config[key], int)
    assert {"rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_scaling"} <= config.keys()
    return tensorrt_llm(config)  # the same places


ENGINES = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm, "llama.cpp": llama_cpp, "mlx": mlx}
