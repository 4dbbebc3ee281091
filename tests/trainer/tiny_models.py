"""Tiny targets and drafters that decode within milliseconds, and a drafter's training in thirty lines."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from trainer.config.sections import DrafterSection, ObjectiveConfig
from trainer.drafter.attention import build_masks
from trainer.drafter.blocks import make_blocks
from trainer.drafter.for_target import config_for_target
from trainer.drafter.model import DFlashDrafter, embed_blocks
from trainer.step.objective import chunk_gradient, slot_weights

VOCAB = 60
PROMPT = [3, 14, 15, 9, 2, 6]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"sliding_window": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def tiny_target(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "gpt_oss" else None).eval()


def drafter_for(target: Any, **section: Any) -> DFlashDrafter:
    settings = DrafterSection(
        **{"num_layers": 2, "block_size": 6, "target_layer_ids": [1, 3], "mask_token_id": VOCAB - 1} | section
    )
    return DFlashDrafter(config_for_target(settings, target.config), seed=1)


def overfit(target: Any, drafter: DFlashDrafter, tokens: list[int], steps: int = 60) -> None:
    """Train the drafter on one text, every token of it behind the prompt an anchor."""
    config = drafter.config
    ids = torch.tensor(tokens)
    length = len(tokens)
    positions = torch.arange(length)
    with torch.no_grad():
        states = target(ids[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in config.target_layer_ids], dim=-1)
    anchors = torch.arange(len(PROMPT), length - 1)
    blocks = make_blocks(
        ids,
        positions,
        torch.zeros_like(ids),
        torch.ones(length, dtype=torch.bool),
        anchors,
        torch.ones(len(anchors), dtype=torch.bool),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    masks = build_masks(config, blocks, length, flex=False)
    embedding, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    objective = ObjectiveConfig(weighting="uniform")
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        embeds = embed_blocks(blocks.tokens, embedding, config.input_embedding_scale)
        hidden = drafter(embeds, features, positions, blocks.positions, masks)
        slots = hidden.view(len(anchors), config.block_size, -1)[:, 1:].reshape(-1, config.hidden_size)
        result = chunk_gradient(
            slots.detach(),
            head,
            blocks.labels.flatten(),
            multiplier=config.output_multiplier,
            softcap=config.final_logit_softcapping,
        )
        weights = slot_weights(result.nll.view_as(blocks.labels), blocks.label_mask, objective).reshape(-1, 1)
        slots.backward(result.gradient * weights / weights.sum())
        optimizer.step()


def official_twin(official: ModuleType, drafter: DFlashDrafter) -> Any:
    twin = official.DFlashDraftModel(official.Qwen3Config(**drafter.config.to_json("float32"))).eval()
    twin.load_state_dict(drafter.state_dict())
    return twin


WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB - 1)), "<mask>"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] == 'user' and 'w3' or 'w4' }} {{ m['content'] }} {% endfor %}w5"


def save_target(target: Any, folder: Path, *, chat: bool = True) -> Path:
    """Write a tiny target with a tokenizer of one word per token, as transformers loads them."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
