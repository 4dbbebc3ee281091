"""A tiny run: a random two-layer Llama as target, random documents, a one-layer drafter. Importable by processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config.sections import RunConfig
from trainer.data.documents import Documents, Statistics
from trainer.data.rows import RowSource
from trainer.drafter.config import DrafterConfig
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.types import HeldOutReport, Hooks, Outcome, StepReport, TrainState
from trainer.target.model import Target

VOCABULARY, HIDDEN, LAYERS, BLOCK = 96, 32, 2, 4
LENGTH, ANCHORS = 64, 8


def run_config(*, targets: int = 1, drafters: int = 1, small: bool = False, **sections: dict[str, Any]) -> RunConfig:
    """A run of six steps. `small`: rows and blocks so few that Python is all that takes time."""
    document: dict[str, Any] = {
        "target": {"path": "unused", "dtype": "float32"},
        "data": {
            "sources": ["unused"],
            "sequence_length": 40 if small else LENGTH,
            "anchors_per_row": 2 if small else ANCHORS,
            "epochs": 10_000,
        },
        "optimizer": {"max_steps": 6, "lr": 1e-3},
        "pipeline": {"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters, "mode": "eager"},
        "objective": {"head_chunk": 16},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return RunConfig.model_validate(document)


def drafter_config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # the least that flex_attention takes on a GPU
        vocab_size=VOCABULARY,
        num_target_layers=LAYERS,
        target_layer_ids=(0, 1),
        block_size=BLOCK,
        mask_token_id=3,
        layer_types=("full_attention",),
    )


def row_source(config: RunConfig, draw: int = 0, epochs: int | None = None) -> RowSource:
    random = np.random.default_rng(draw)
    lengths = random.integers(10, 40, size=30)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    documents = Documents(
        tokens=random.integers(4, VOCABULARY, size=total).astype(np.int32),
        supervised=np.ones(total, np.bool_),
        offsets=offsets.astype(np.int64),
        candidates=(lengths - 2).astype(np.int64),
        statistics=Statistics(records=30, documents=30, tokens=total, supervised=total),
        content_hash=f"tiny {draw}",
    )
    data = config.data
    return RowSource(
        documents,
        sequence_length=data.sequence_length,
        anchors_per_row=data.anchors_per_row,
        epochs=epochs or data.epochs,
        seed=data.seed,
    )


def load_target(device: torch.device, last_hidden: bool = False) -> Target:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return Target(model, drafter_config().target_layer_ids, device, last_hidden=last_hidden)


class Recorder:
    """Hooks that remember."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.saved: list[TrainState] = []
        self.saved_sums: list[torch.Tensor | None] = []
        self.compiled: list[dict[str, Any]] = []
        self.statuses: list[str] = []
        self.held_out: list[HeldOutReport] = []

    def hooks(self, **others: Any) -> Hooks:
        known: dict[str, Any] = {
            "on_status": self.statuses.append,
            "on_compiled": self.compiled.extend,
            "on_step": self.steps.append,
            "on_held_out": self.held_out.append,
            "save": self._save,
        }
        return Hooks(**{**known, **others})

    def _save(self, state: TrainState, sums: torch.Tensor | None) -> None:
        self.saved.append(state)
        self.saved_sums.append(sums)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.steps]


def train(
    config: RunConfig,
    recorder: Recorder | None = None,
    start: TrainState | None = None,
    load_target: Callable[..., Target] = load_target,
    source: RowSource | None = None,
    **hooks: Any,
) -> tuple[Recorder, Outcome]:
    recorder = recorder or Recorder()
    distils = config.objective.distillation != "none"
    pipeline = Pipeline(
        config,
        drafter_config(),
        source or row_source(config),
        recorder.hooks(**hooks),
        start,
        load_target=lambda device: load_target(device, distils),
        held_out=row_source(config, 1, epochs=1) if config.data.held_out is not None else None,
    )
    return recorder, pipeline.run()


def losses_of_this_process(drafters: int, steps: int, path: Path, /, **pipeline: Any) -> None:
    """Train as one of several processes, told apart by torchrun's environment variables; write the losses."""
    recorder, _ = train(run_config(drafters=drafters, optimizer={"max_steps": steps}, pipeline=pipeline))
    path.write_text("\n".join(loss.hex() for loss in recorder.losses))
