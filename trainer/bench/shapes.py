"""Builds targets, drafters and rows of a preset's shape, with random weights and tokens."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.config.sections import RunConfig
from trainer.data.documents import Documents
from trainer.data.rows import RowSource
from trainer.drafter.config import DrafterConfig
from trainer.step.step import DrafterStep, PreparedRow
from trainer.target.model import Target


@dataclass(frozen=True)
class Preset:
    """The shapes of a target, its drafter and a row."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    taps: tuple[int, ...]
    drafter_layers: int
    block: int
    length: int
    anchors: int
    head_chunk: int = 4096


PRESETS = {
    "tiny": Preset(64, 128, 4, 4, 2, 16, 512, True, (0, 2), 2, 8, 256, 32, 128),
    "smollm2": Preset(576, 1536, 30, 9, 3, 64, 49152, True, (1, 8, 14, 21, 27), 5, 16, 2048, 128),
    "qwen3-8b": Preset(4096, 12288, 36, 32, 8, 128, 151936, False, (1, 9, 17, 25, 33), 5, 16, 8192, 512),
}


def drafter_config(preset: Preset) -> DrafterConfig:
    """The drafter of a preset."""
    return DrafterConfig(
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.drafter_layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        vocab_size=preset.vocabulary,
        num_target_layers=preset.layers,
        target_layer_ids=preset.taps,
        block_size=preset.block,
        mask_token_id=3,
        layer_types=tuple("full_attention" for _ in range(preset.drafter_layers)),
    )


def load_target(preset: Preset, device: torch.device) -> Target:
    """A target of the preset's shape with random weights, bfloat16 on a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        vocab_size=preset.vocabulary,
        tie_word_embeddings=preset.tied,
        max_position_embeddings=preset.length,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model, preset.taps, device)


def row_source(preset: Preset, rows: int) -> RowSource:
    """At least `rows` rows of random documents, each a quarter of a row or less."""
    random = np.random.default_rng(0)
    documents = []
    for _ in range(64):
        length = int(random.integers(preset.length // 8, preset.length // 4))
        ids = random.integers(4, preset.vocabulary, size=length).tolist()
        documents.append((ids, [True] * length))
    made = Documents.from_lists(documents)

    def source(epochs: int) -> RowSource:
        return RowSource(made, sequence_length=preset.length, anchors_per_row=preset.anchors, epochs=epochs, seed=0)

    return source(-(-rows // source(1).rows_per_epoch))


def run_config(options: argparse.Namespace, steps: int) -> RunConfig:
    """A run of so many steps, as `options` describe it."""
    preset: Preset = options.shape
    return RunConfig.model_validate(
        {
            "target": {"path": "random"},
            "data": {
                "sources": ["random"],
                "sequence_length": preset.length,
                "anchors_per_row": preset.anchors,
            },
            "objective": {"head_chunk": preset.head_chunk},
            "optimizer": {"max_steps": steps, "name": options.optimizer},
            "checkpoint": {"every": 10**9},
            "pipeline": {
                "targets": options.targets or [options.device],
                "drafters": options.drafters or [options.device],
                "mode": options.mode,
            },
        }
    )


def drafter_step(preset: Preset, config: RunConfig, device: torch.device) -> DrafterStep:
    """A drafter step of a run with a random drafter, embedding and head."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def table() -> torch.Tensor:
        made = torch.empty(preset.vocabulary, preset.hidden, dtype=dtype, device=device)
        return made.normal_(0.0, 0.02, generator=generator)

    embedding = table()
    head = embedding if preset.tied else table()
    steps = config.optimizer.max_steps or 1000
    return DrafterStep.build(config, drafter_config(preset), embedding=embedding, head=head, total_steps=steps)


def rows_of(preset: Preset, count: int, device: torch.device) -> list[PreparedRow]:
    """Prepared rows."""
    source = row_source(preset, count)
    return [PreparedRow.of(source.row(n), preset.block, pin=device.type == "cuda") for n in range(count)]
