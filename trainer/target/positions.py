"""Tells how many tokens of a text a target can read at most, before its weights are loaded."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

_log = logging.getLogger(__name__)

OFFSET = 2  # rows of OPT's table, and of those like it, before the first position's


def learned_positions(config: Any) -> int | None:
    """How many positions the target has a vector for (GPT-2, OPT), by its transformers `config`; None for no limit.

    Rotary and other computed positions have no end, whatever `max_position_embeddings` says: longer texts are read,
    if not well. The model is built without memory for weights, and asked for a table of as many rows.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    build: Any = AutoModelForCausalLM
    try:
        trusted = type(config).__module__.startswith("transformers_modules")  # else its code would not be here
        with torch.device("meta"):
            model = build.from_config(config, trust_remote_code=trusted)
    except Exception as error:  # code of others, which was made to be built with memory
        _log.debug("whether positions of %s end is not known: %s", config.model_type, error)
        return None
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        table = module is not words and isinstance(module, nn.Embedding) and _names_positions(name)
        if table and module.num_embeddings in (positions, positions + OFFSET):
            return int(positions)
    for name, buffer in model.named_buffers():  # sines up to a last position (GPT-J)
        if _names_positions(name.rpartition(".")[2]) and len(buffer) == positions:
            return int(positions)
    return None


def _names_positions(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "position" in last or last == "wpe"
