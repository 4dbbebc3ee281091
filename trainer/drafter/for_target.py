"""Shapes a new drafter for a target: what the run's configuration leaves out follows the target."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import PreTrainedConfig

from trainer.config.sections import DrafterSection
from trainer.drafter.config import (
    FIXED_ROPE_TYPES,
    DrafterConfig,
    DrafterConfigError,
    LayerType,
    build_target_layer_ids,
)
from trainer.hub import drafter_folder

_RESERVED_TOKEN = re.compile(r"reserved|unused|extra_id|gh_stars|repo_?name", re.IGNORECASE)


class _Tokenizer(Protocol):
    """What the mask rule reads of a tokenizer."""

    mask_token_id: int | None

    def get_vocab(self) -> dict[str, int]: ...


def config_for_target(
    section: DrafterSection, target: PreTrainedConfig, tokenizer: _Tokenizer | None = None
) -> DrafterConfig:
    """Shape a drafter for a target from the run's configuration; what the section leaves out follows the target.

    A released drafter to continue from (`init_from`) brings its own shape, which the section may repeat but not
    change. Raises DrafterConfigError.
    """
    text = target.get_text_config()
    if section.init_from is not None:
        folder = drafter_folder(section.init_from)
        config = DrafterConfig.read(folder)
        _require_layer_ids(folder)
        _check_repeats(section, config)
    else:
        config = _new_config(section, text, tokenizer)
    config.check_target(text)
    return config


def _require_layer_ids(folder: Path) -> None:
    """Refuse to continue from a drafter whose layers would have to be guessed: guessed wrong, its training is lost."""
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not (document.get("target_layer_ids") or (document.get("dflash_config") or {}).get("target_layer_ids")):
        raise DrafterConfigError(
            f"{folder}/config.json does not say which layers of the target the drafter reads: add target_layer_ids, "
            "with the layers that it was trained on"
        )


def choose_mask_token(
    explicit: int | None, tokenizer: _Tokenizer | None, vocab_size: int, *, in_use: frozenset[int] = frozenset()
) -> int:
    """Return the embedding row that stands for a masked slot; it is frozen, so any row that text never uses will do.

    In this order: `explicit`; the tokenizer's own mask token; the first row that no token owns; a token whose name
    says that it is reserved and which is not `in_use`. Raises DrafterConfigError when there is none, or when the
    explicit one is in use.
    """
    if explicit is not None:
        if explicit in in_use:
            raise DrafterConfigError(
                f"drafter.mask_token_id {explicit} is a token that the target's text begins or ends with; "
                "name one that never occurs in text, or leave it out"
            )
        return explicit
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        mask = tokenizer.mask_token_id
        if mask is None:
            mask = vocabulary.get("<mask>", vocabulary.get("<|MASK|>"))
        if mask is not None:
            return mask
        if (first_free := max(vocabulary.values()) + 1) < vocab_size:
            return first_free
        reserved = [i for name, i in vocabulary.items() if _RESERVED_TOKEN.search(name) and name[:1] in "<["]
        if reserved := [i for i in reserved if i not in in_use]:
            return min(reserved)
    raise DrafterConfigError(
        "no token of the target can stand for a masked slot: set drafter.mask_token_id to the id of a token "
        "that never occurs in text"
    )


def _new_config(section: DrafterSection, text: PreTrainedConfig, tokenizer: _Tokenizer | None) -> DrafterConfig:
    layers = section.num_layers
    target_layers = int(text.num_hidden_layers)
    ids = section.target_layer_ids or build_target_layer_ids(target_layers, layers)
    full = {layers - 1} if section.full_attention_layers is None else set(section.full_attention_layers)
    if wrong := {i for i in full if not 0 <= i < layers}:
        raise DrafterConfigError(f"drafter.full_attention_layers names {sorted(wrong)}; layers are 0 to {layers - 1}")
    layer_types = tuple(
        "full_attention" if section.sliding_window is None or i in full else "sliding_attention" for i in range(layers)
    )
    heads = section.num_attention_heads or int(text.num_attention_heads)
    kv_heads = section.num_key_value_heads or int(getattr(text, "num_key_value_heads", None) or heads)
    scale, multiplier, softcap = _output_scaling(text)
    ends = [getattr(text, name, None) for name in ("bos_token_id", "eos_token_id")]  # Llama 3 has several of the latter
    in_use = frozenset(i for ids in ends for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return DrafterConfig(
        hidden_size=int(text.hidden_size),
        intermediate_size=section.intermediate_size or _intermediate_size(text),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=section.head_dim or int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocab_size=int(text.vocab_size),
        num_target_layers=target_layers,
        target_layer_ids=tuple(ids),
        block_size=section.block_size,
        mask_token_id=choose_mask_token(section.mask_token_id, tokenizer, int(text.vocab_size), in_use=in_use),
        layer_types=cast(tuple[LayerType, ...], layer_types),
        sliding_window=section.sliding_window,
        rope_parameters=_rope_for_target(text),
        max_position_embeddings=int(text.max_position_embeddings),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        input_embedding_scale=scale,
        output_multiplier=multiplier,
        final_logit_softcapping=softcap,
    )


def _intermediate_size(text: PreTrainedConfig) -> int:
    """Return the target's MLP width; three hidden sizes where the target's MLP is a mixture of experts."""
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    dense = getattr(text, "intermediate_size", None)
    return 3 * int(text.hidden_size) if experts or not dense else int(dense)


def _output_scaling(text: PreTrainedConfig) -> tuple[float, float, float | None]:
    """Return what the target multiplies its embeddings by and its logits by, and the logits' soft-cap."""

    def first(*names: str) -> float | None:
        return next((float(value) for name in names if (value := getattr(text, name, None))), None)

    scale = first("embedding_multiplier", "scale_emb") or 1.0  # Granite, Falcon H1, HyperCLOVA X; MiniCPM
    if "gemma" in str(text.model_type) or getattr(text, "mup_enabled", False):  # the latter: Trinity
        scale = float(text.hidden_size) ** 0.5
    multiplier = first("logit_scale", "lm_head_multiplier") or 1.0  # Cohere; Falcon H1
    if (scaling := first("logits_scaling")) is not None:  # Granite divides by what HyperCLOVA X multiplies by
        multiplier = scaling if text.model_type == "hyperclovax" else 1.0 / scaling
    if (base := first("dim_model_base")) is not None:  # MiniCPM
        multiplier = base / float(text.hidden_size)
    return scale, multiplier, first("final_logit_softcapping", "logits_soft_cap")


def _rope_for_target(text: PreTrainedConfig) -> dict[str, Any]:
    """Return RoPE for a new drafter: the target's base, and its scaling where that does not depend on the length.

    Multimodal sections, partial rotation and length-dependent variants are left out: the released drafters of such
    targets rotate whole heads with plain frequencies.
    """
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    if "full_attention" in rope:  # one set for each layer type
        rope = rope["full_attention"]
    theta = float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)
    if rope.get("rope_type") not in FIXED_ROPE_TYPES - {"default"}:
        return {"rope_type": "default", "rope_theta": theta}
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"} | {"rope_theta": theta}


def _check_repeats(section: DrafterSection, config: DrafterConfig) -> None:
    """Refuse a section that asks for another shape than the drafter it continues from."""
    there: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "full_attention_layers": [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"],
        "target_layer_ids": list(config.target_layer_ids),
    }
    for name in section.model_fields_set - {"init_from"}:
        ours, theirs = getattr(section, name), there[name] if name in there else getattr(config, name)
        if ours is not None and ours != theirs:
            raise DrafterConfigError(
                f"drafter.{name} is {ours}, but the drafter in drafter.init_from has {theirs}; leave {name} out"
            )
