"""Loads a target's model, configuration and tokenizer with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.config.sections import TargetConfig
from trainer.inputs import hub_answers, is_hub_name, require_target


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
    return _from_pretrained(AutoModelForCausalLM, "the target", config, **options)


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
    except (OSError, ValueError, ImportError) as error:
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
