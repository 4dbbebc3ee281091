"""Holds a drafter's shape, and reads and writes it as the `config.json` of released DFlash checkpoints.

The file is a Qwen3 configuration with a few more fields, whatever the target's family. Releases put `block_size`,
`mask_token_id` and `target_layer_ids` at the top level or in `dflash_config`; both are read (the nested one wins, as
in the official package) and both are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

LayerType = Literal["full_attention", "sliding_attention"]

# Fields of dflash_config that this trainer understands. Any other one would change the drafter behind our back.
_KNOWN_DFLASH_FIELDS = frozenset(
    {
        "block_size",
        "mask_token_id",
        "mask_token",
        "target_layer_ids",
        "num_target_layers",
        "causal",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
        "use_aux_hidden_state",
        "sample_from_anchor",
    }
)
# RoPE variants whose frequencies are fixed; the others ("dynamic", "longrope") change with the sequence's length.
FIXED_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3"})


class DrafterConfigError(ValueError):
    """A drafter that cannot be built as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Which keys a layer's queries may see, beside the rule that context ends before the anchor."""

    window: int | None
    """Keys further back than this many positions are hidden, the query's own position counted; None: no limit."""
    causal: bool
    """Whether a slot of a block sees only earlier slots and itself, rather than the whole block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Everything that `config.json` says about a drafter."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose outputs are tapped, in the order in which `fc` reads them."""
    block_size: int
    mask_token_id: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    """None: sliding layers are causal inside the block, full ones are not."""
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e6})
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    initializer_range: float = 0.02
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise DrafterConfigError(f"block_size is {self.block_size}; a block needs an anchor and one drafted slot")
        if len(self.layer_types) != self.num_hidden_layers:
            raise DrafterConfigError(
                f"layer_types names {len(self.layer_types)} layers and num_hidden_layers says {self.num_hidden_layers}"
            )
        if unknown := set(self.layer_types) - {"full_attention", "sliding_attention"}:
            raise DrafterConfigError(f"layer_types has {sorted(unknown)}; known are full_attention, sliding_attention")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise DrafterConfigError("a sliding_attention layer needs sliding_window, and use_sliding_window true")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterConfigError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key heads evenly"
            )
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside or not self.target_layer_ids:
            raise DrafterConfigError(
                f"target_layer_ids {list(self.target_layer_ids)} must name layers 0 to {self.num_target_layers - 1}"
            )
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise DrafterConfigError(
                f"target_layer_ids {list(self.target_layer_ids)} must ascend, each layer once: serving engines tap in "
                "ascending order, whatever order is written"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterConfigError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's {self.vocab_size} embeddings"
            )
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in FIXED_ROPE_TYPES:
            raise DrafterConfigError(
                f"RoPE type '{rope_type}' changes with the length of the text; supported: {sorted(FIXED_ROPE_TYPES)}"
            )

    def attention_kind(self, layer_type: LayerType) -> AttentionKind:
        """Return what the layers of `layer_type` may see."""
        sliding = layer_type == "sliding_attention"
        causal = sliding if self.is_causal is None else self.is_causal
        return AttentionKind(window=self.sliding_window if sliding else None, causal=causal)

    @property
    def kinds(self) -> dict[LayerType, AttentionKind]:
        """The attention kinds of this drafter, one for each layer type that it has."""
        return {layer_type: self.attention_kind(layer_type) for layer_type in sorted(set(self.layer_types))}

    def to_transformers(self) -> Qwen3Config:
        """Return the Qwen3 configuration that transformers' RoPE functions take."""
        return Qwen3Config(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            num_hidden_layers=self.num_hidden_layers,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """Read the fields of a released `config.json`.

        Raises DrafterConfigError for other drafter families and for fields that this trainer does not know.
        """
        nested: Mapping[str, Any] = data.get("dflash_config") or {}
        _refuse_other_families(data, nested)

        def either(name: str, default: Any = None) -> Any:
            return nested.get(name, data.get(name, default))

        def needed(name: str) -> Any:
            if (value := either(name)) is None:
                raise DrafterConfigError(f"config.json has no {name}, neither at the top level nor in dflash_config")
            return value

        layers = int(needed("num_hidden_layers"))
        window = data.get("sliding_window") if data.get("use_sliding_window", True) else None
        causal = data.get("is_causal", nested.get("causal"))
        softcap = either("final_logit_softcapping")
        target_layers = int(needed("num_target_layers"))
        return cls(
            hidden_size=int(needed("hidden_size")),
            intermediate_size=int(needed("intermediate_size")),
            num_hidden_layers=layers,
            num_attention_heads=int(needed("num_attention_heads")),
            num_key_value_heads=int(data.get("num_key_value_heads") or needed("num_attention_heads")),
            head_dim=int(data.get("head_dim") or needed("hidden_size") // needed("num_attention_heads")),
            vocab_size=int(needed("vocab_size")),
            num_target_layers=target_layers,
            target_layer_ids=tuple(either("target_layer_ids") or build_target_layer_ids(target_layers, layers)),
            block_size=int(needed("block_size")),
            mask_token_id=int(needed("mask_token_id")),
            layer_types=_layer_types(data, layers, window),
            sliding_window=window,
            is_causal=None if causal is None else bool(causal),
            rope_parameters=_rope_from_json(data),
            max_position_embeddings=int(data.get("max_position_embeddings", 40960)),
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            hidden_act=str(data.get("hidden_act", "silu")),
            attention_bias=bool(data.get("attention_bias", False)),
            initializer_range=float(data.get("initializer_range", 0.02)),
            input_embedding_scale=float(either("input_embedding_scale", 1.0)),
            output_multiplier=float(either("output_multiplier", 1.0)),
            final_logit_softcapping=float(softcap) if softcap else None,
        )

    def to_json(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """Return `config.json`, each draft field both at the top level and in `dflash_config`.

        `is_causal` is written when it differs from the rule by layer type, and when every layer is causal: llama.cpp
        knows no other sign of that. Elsewhere readers that predate it would stumble over a field that says nothing.
        """
        sliding = "sliding_attention" in self.layer_types
        rope = dict(self.rope_parameters)
        draft: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.input_embedding_scale != 1.0:
            draft["input_embedding_scale"] = self.input_embedding_scale
        if self.output_multiplier != 1.0:
            draft["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            draft["final_logit_softcapping"] = self.final_logit_softcapping
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        document: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **draft,
            "dflash_config": dict(draft),
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": self.hidden_act,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
            "rope_parameters": rope,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window if sliding else None,
            "use_sliding_window": sliding,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        causal = [self.attention_kind(layer_type).causal for layer_type in self.layer_types]
        by_type = [layer_type == "sliding_attention" for layer_type in self.layer_types]
        if all(causal) or causal != by_type:
            document["is_causal"] = document["dflash_config"]["causal"] = causal[0]
        return document

    def engine_limits(self) -> list[str]:
        """What serving engines are known not to do with this drafter, a sentence each.

        Seen with llama.cpp b11434, vLLM 0.32.0 and SGLang 0.5.23.
        """
        limits = []
        if len({kind.causal for kind in self.kinds.values()}) > 1:
            limits.append(
                "llama.cpp has one causal flag for a whole drafter: the sliding layers of this one, causal in the "
                "block, would run bidirectionally there and be accepted less. Don't serve it there."
            )
        if self.input_embedding_scale != 1.0:
            limits.append(
                f"vLLM and SGLang ignore input_embedding_scale ({self.input_embedding_scale:g} here): drafts get "
                "worse, without a warning (3.01 accepted tokens became 2.03 in one measurement)."
            )
        return limits

    @classmethod
    def read(cls, folder: Path) -> DrafterConfig:
        """Read `folder/config.json`; raises DrafterConfigError with the file's name."""
        path = folder / "config.json"
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise DrafterConfigError(f"{folder} is not a drafter: it has no config.json") from None
        except (json.JSONDecodeError, DrafterConfigError) as error:
            raise DrafterConfigError(f"{path}: {error}") from error

    def check_target(self, target: PreTrainedConfig) -> None:
        """Raise DrafterConfigError unless the drafter can borrow this target's embedding, head and features.

        Nor may it tap the last layer: whoever serves it reads what transformers calls the last hidden state, and that
        is behind the final norm.
        """
        text = target.get_text_config()
        for ours, theirs in (
            ("hidden_size", "hidden_size"),
            ("vocab_size", "vocab_size"),
            ("num_target_layers", "num_hidden_layers"),
        ):
            if getattr(self, ours) != getattr(text, theirs):
                raise DrafterConfigError(
                    f"the drafter was made for another target: its {ours} is {getattr(self, ours)}, "
                    f"the target's {theirs} is {getattr(text, theirs)}"
                )
        if (last := self.num_target_layers - 1) in self.target_layer_ids:
            raise DrafterConfigError(
                f"target_layer_ids {list(self.target_layer_ids)} has the target's last layer ({last}), which other "
                f"programs show only behind the final norm; name layers 0 to {last - 1}"
            )


def build_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Return `count` layers spread evenly from the second to the third-last, as the official package does.

    Raises DrafterConfigError when the target has too few layers for that many different ones.
    """
    if count == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    ids = [round(first + i * (last - first) / (count - 1)) for i in range(count)]
    if len(set(ids)) < count or last < first:
        raise DrafterConfigError(
            f"a target of {num_target_layers} layers has no even spread of {count} layers between the second and the "
            "third-last; set drafter.target_layer_ids"
        )
    return ids


def _rope_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        if data.get("rope_theta") is None:
            raise DrafterConfigError("config.json has no rope_theta, neither at the top level nor in rope_parameters")
        rope["rope_theta"] = data["rope_theta"]
    return rope


def _layer_types(data: Mapping[str, Any], layers: int, window: int | None) -> tuple[LayerType, ...]:
    if types := data.get("layer_types"):
        return tuple(types)
    first_sliding = data.get("max_window_layers", layers) if window else layers
    return tuple("sliding_attention" if i >= first_sliding else "full_attention" for i in range(layers))


def _refuse_other_families(data: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    architectures: Sequence[str] = data.get("architectures") or []
    if "speculators_model_type" in data:
        raise DrafterConfigError(
            "this is a checkpoint in speculators' format; give a folder in the released DFlash layout"
        )
    if "DFlash2DraftModel" in architectures or any(key.startswith(("conv_", "selector_")) for key in nested):
        raise DrafterConfigError(
            "this is a DFlash2 drafter (convolutions and a path selector); only first-generation DFlash is trained here"
        )
    if architectures and "DFlashDraftModel" not in architectures:
        raise DrafterConfigError(f"this is a {architectures[0]}, not a DFlashDraftModel")
    if nested.get("sample_from_anchor") or data.get("sample_from_anchor"):
        raise DrafterConfigError(
            "sample_from_anchor is true: slots predict the next token (DSpark's layout), not their own as in DFlash"
        )
    if unknown := sorted(set(nested) - _KNOWN_DFLASH_FIELDS):
        raise DrafterConfigError(
            f"dflash_config has {', '.join(unknown)}, which this trainer does not know; "
            "training without it would give another drafter than the one that is served"
        )
