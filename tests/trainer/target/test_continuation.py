"""Continuation: targets that lose what they have read are refused by name before anything is decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.trainer.tiny_models import FAMILIES, SIZES, tiny_target
from trainer.pretrained import TargetError
from trainer.target.continuation import refuse_wrong_answers, refuse_wrong_blocks

DTYPES = [torch.float32, torch.bfloat16]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
STATES = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
LOSE: dict[str, dict[str, Any]] = {
    "jamba": EXPERTS | STATES | {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"state_size": 8, "time_step_rank": 4},
}
"""Families whose layers start from nothing when they read several tokens behind others"""
RAISE: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"] * 4,
    },
}
"""Families with caches of their own"""


def build(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | {"num_hidden_layers": 8} | (LOSE | RAISE)[family])
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_targets_that_go_on_behind_a_text_are_taken(family: str, dtype: torch.dtype) -> None:
    target = tiny_target(family).to(dtype)
    refuse_wrong_blocks(target)
    refuse_wrong_answers(target, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_text"])
def test_the_rounding_of_a_deep_target_in_half_precision_is_not_taken_for_a_loss(family: str) -> None:
    layers = {name: kinds * 8 for name, kinds in FAMILIES[family].items() if name == "layer_types"}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family] | layers | {"num_hidden_layers": 48})
    target = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    refuse_wrong_blocks(target)
    refuse_wrong_answers(target, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", LOSE)
def test_a_target_that_ignores_its_state_at_a_block_is_refused(family: str, dtype: torch.dtype) -> None:
    target = build(family, dtype)
    with pytest.raises(TargetError, match=rf"{type(target).__name__} reads a block of tokens behind a text otherwise"):
        refuse_wrong_blocks(target)
    refuse_wrong_answers(target, 4)  # by single tokens it is right


@pytest.mark.parametrize("family", RAISE)
def test_a_target_whose_cache_cannot_go_back_is_refused(family: str) -> None:
    target = build(family, torch.float32)
    with pytest.raises(TargetError, match=rf"{type(target).__name__} cannot read a block of tokens behind a text in"):
        refuse_wrong_blocks(target)


def test_a_target_that_mixes_padding_into_its_state_must_answer_one_prompt_at_a_time() -> None:
    target = build("minimax", torch.float32)
    with pytest.raises(TargetError, match=r"MiniMaxForCausalLM reads a prompt beside a longer one .*--batch-size 1"):
        refuse_wrong_answers(target, 2)
    refuse_wrong_answers(target, 1)
