"""The way a drafter step goes on a GPU, taken on a CPU: flex_attention, every function traced whole."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

from tests.trainer.pipeline import tiny
from trainer.compilation.turn import Turn
from trainer.config.sections import ObjectiveConfig, OptimizerConfig
from trainer.data import Documents, Row, RowSource
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import DFlashDrafter
from trainer.step import step as step_module
from trainer.step.optim import build_optimizer
from trainer.step.step import DrafterStep, PreparedRow

CPU = torch.device("cpu")
LENGTH, ANCHORS = 256, 24
SHAPES = {
    "full": {"layer_types": ("full_attention",) * 3},
    "hybrid": {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 40},
}


def config_of(shape: str) -> DrafterConfig:
    fields = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tiny.VOCABULARY,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3),
        "block_size": 8,
        "mask_token_id": 3,
    }
    return DrafterConfig(**fields | SHAPES[shape])  # type: ignore[arg-type]


def row() -> Row:
    documents = [([4 + (7 * n * n + d) % 90 for n in range(60 + d)], [n > 5 for n in range(60 + d)]) for d in range(6)]
    source = RowSource(
        Documents.from_lists(documents), sequence_length=LENGTH, anchors_per_row=ANCHORS, epochs=1, seed=0
    )
    return source.row(0)


def step_of(config: DrafterConfig, objective: ObjectiveConfig) -> DrafterStep:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator) * 0.3
    drafter = DFlashDrafter(config, seed=0)
    optimizer = build_optimizer(drafter.named_parameters(), OptimizerConfig(), 10)
    return DrafterStep(
        drafter, optimizer, objective, embedding=table, head=table, sequence_length=LENGTH, anchors=ANCHORS
    )


@pytest.mark.parametrize("distillation", ["none", "forward_kl"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_traced_whole_and_computes_what_the_eager_reference_does(
    shape: str, distillation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(step_module, "trains_by_flex", lambda device: True)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)  # refuses gradients on a CPU
    config, objective = config_of(shape), ObjectiveConfig(distillation=distillation, head_chunk=64)  # type: ignore[arg-type]
    prepared = PreparedRow.of(row(), config.block_size, pin=False)
    gradients, measured = [], []
    for mode in ("eager", "compiled"):
        step = step_of(config, objective)
        turn = Turn("drafter 0", CPU, None, mode)  # type: ignore[arg-type]
        turn.compile = partial(turn.compile, backend="aot_eager")  # type: ignore[method-assign]
        step.prepare(turn)
        features, last_hidden = step.feature_buffers()
        generator = torch.Generator().manual_seed(1)
        features.normal_(generator=generator)
        if last_hidden is not None:
            last_hidden.normal_(generator=generator)
        step.load(prepared.row, features, last_hidden)
        step.accumulate(prepared.valid_slots)
        gradients.append(step.exchanged.clone())
        step.measure(prepared.valid_slots, torch.tensor(True))
        assert torch.equal(step.exchanged, gradients[-1])
        measured.append(step.measured.clone())
    report = turn.report()
    assert (report.compiled, report.graph_breaks, report.recompiles) == (True, 0, 0), report
    # prologue, epilogue, head, weights; and for each kind of layer one graph, plus one for the first, whose input
    # has no gradient
    assert report.graphs == 4 + (2 if shape == "full" else 3)
    assert prepared.valid_slots > 50
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(measured[1], measured[0], rtol=1e-4, atol=1e-4)
