"""Loads a target's model, configuration and tokenizer with transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from trainer.config.sections import TargetConfig
from trainer.inputs import hub_answers, is_hub_name, require_target

# What files may hold beside a language model's weights: encoders of pictures and sound, layers that predict further
# tokens (`mtp`), scales of a quantised cache. Most models name these themselves, and transformers leaves them out.
_OTHER_PARTS = re.compile(r"(^|\.)(visual|vision|audio|image|mtp|nextn|multi_modal|mm_)[^.]*(\.|$)|\.[kv]_scale$")
_LAYER = re.compile(r"(^|.*\.)layers\.(\d+)\.")
_PREDICTS_FURTHER = re.compile(r"\.(eh_proj|enorm|hnorm|nextn_\w+)(\.|$)")


class TargetError(Exception):
    """A target that cannot be used; the text is one sentence."""


def load_model(config: TargetConfig, device: torch.device | str) -> Any:
    """The transformers model of a config, on `device`, for inference.

    Raises:
        TargetError, InputError: it cannot be loaded; says why.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device(device)
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.attention not in ("auto", "varlen"):
        options["attn_implementation"] = config.attention
    if device.type == "cuda":
        options["device_map"] = {"": device}
    # Shapes that differ would raise an error that names nothing; the loading info names them.
    model, info = _from_pretrained(
        AutoModelForCausalLM, "the target", config, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    if fault := describe_fault(info):
        raise TargetError(f"target.path: the files of {config.path} {fault}")
    return model


def describe_fault(info: Mapping[str, Collection[Any]]) -> str | None:
    """What is wrong with a model's weights by transformers' loading info, named; None when all are there.

    transformers makes weights up at random where files lack them, and says so in a report alone.
    """
    if lacking := sorted(info["missing_keys"], key=_by_number):
        return f"lack {_first(lacking)}: fetch them again, or check what wrote them"
    if mismatched := sorted(info["mismatched_keys"], key=lambda entry: _by_number(entry[0])):
        name, there, wanted = mismatched[0]
        return f"hold {name} in the shape {list(there)}, but config.json makes it {list(wanted)}"
    names = [name for name in info["unexpected_keys"] if not _OTHER_PARTS.search(name)]
    further = {match[0] for name in names if _PREDICTS_FURTHER.search(name) and (match := _LAYER.match(name))}
    unknown = sorted((name for name in names if not name.startswith(tuple(further))), key=_by_number)
    if unknown:
        return f"hold {_first(unknown)}, for which the model of config.json has no place: one belongs to another model"
    if info["error_msgs"]:
        return f"cannot be read: {next(iter(info['error_msgs']))}".splitlines()[0]
    return None


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def load_model_config(config: TargetConfig) -> Any:
    """The target's transformers configuration, without its weights.

    Raises:
        TargetError, InputError: it cannot be loaded; says why.
    """
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, "the configuration of the target", config)


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer.

    Raises:
        TargetError, InputError: it cannot be loaded; says why.
    """
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, "the tokenizer of the target", config)


def _from_pretrained(kind: Any, what: str, config: TargetConfig, **options: Any) -> Any:
    require_target(config)
    if config.gguf_file is not None:
        options["gguf_file"] = config.gguf_file
    unreachable = is_hub_name(config.path) and not hub_answers()
    if unreachable:  # what was fetched before can be had all the same
        options["local_files_only"] = True
    try:
        return kind.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        if unreachable:
            raise TargetError(
                f"target.path: there is no folder {config.path} in {Path.cwd()}, and the model hub does not answer"
            ) from error
        raise TargetError(f"{what} {config.path} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids at which the target ends an answer, by its generation config or else its tokenizer; perhaps none."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())
