"""The way a target goes on a GPU, taken on a CPU: variable-length attention, compiled layers, a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.target.test_model import TAPS, build, config_of, graph_turn, row, rows
from trainer.compilation.errors import CompilationError
from trainer.compilation.phase import CompilePhase
from trainer.data import RowSource
from trainer.pretrained import TargetError
from trainer.target import attention
from trainer.target.features import FeatureMaker
from trainer.target.model import Target

__all__ = ["row", "rows"]

CPU = torch.device("cpu")
# Kinds of layers: Gemma 3 and gpt-oss have those with a window and those without.
PACKED = {
    "llama": 1,
    "qwen3": 1,
    "qwen3_moe": 1,
    "gemma": 1,
    "gemma3_text": 2,
    "gpt_oss": 2,
    "mistral": 1,
    "granite": 1,
    "cohere": 1,
}


@pytest.mark.parametrize(("family", "kinds"), PACKED.items())
def test_every_layer_that_a_gpu_compiles_is_traced_whole_with_documents_windows_and_sinks(
    family: str, kinds: int, rows: RowSource
) -> None:
    torch.compiler.reset()
    target = Target(build(config_of(family)), TAPS, CPU, attention="varlen")
    exact = Target(build(config_of(family)), TAPS, CPU)
    assert (target.attention, target.uncapturable) == ("varlen", "")
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("aot_eager")
    maker.prepare(turn)
    report = turn.report()
    assert (report.compiled, report.graphs, report.graph_breaks, report.note) == (True, kinds, 0, "")
    for number in range(3):
        row = rows.row(number)
        torch.testing.assert_close(
            maker.make(row).hidden[row.loss_mask], exact.features(row).hidden[row.loss_mask], rtol=1e-4, atol=1e-4
        )
    assert turn.report().graphs == kinds


def test_attention_that_dynamo_cannot_trace_takes_the_compiled_path_away_and_ends_the_start(
    rows: RowSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a call on the way, a ContextVar's then, once ran every target uncompiled. torch 2.15 traces ContextVars."""
    torch.compiler.reset()
    own = attention.AttentionInterface._global_mapping[attention.VARLEN]

    def reading(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return own(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.VARLEN, reading)
    target = Target(build(config_of("qwen3")), TAPS, CPU, attention="varlen")
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("aot_eager")
    maker.prepare(turn)
    report = turn.report()
    assert not report.compiled
    assert "its layers run uncompiled" in report.note
    assert "target.compile: false" in (report.shortcoming("graph") or "")


def test_the_reference_kernel_keeps_documents_windows_and_sinks_as_the_plain_sum_says() -> None:
    torch.manual_seed(0)
    length, heads, kv_heads, width, window = 13, 4, 2, 8, 3
    query, key, value = (torch.randn(length, n, width, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    boundaries = torch.tensor([0, 5, 13, 13], dtype=torch.int32)
    made = attention.varlen_reference(
        query,
        key,
        value,
        boundaries,
        boundaries,
        8,
        8,
        window_size=(window - 1, 0),
        return_aux=attention.AuxRequest(True),
    )
    assert isinstance(made, tuple)
    for q in range(length):
        start = 0 if q < 5 else 5
        seen = [k for k in range(length) if start <= k <= q and q - k < window]
        for head in range(heads):
            scores = torch.stack([query[q, head] @ key[k, head // 2] for k in seen]) / width**0.5
            right = sum(p * value[k, head // 2] for p, k in zip(scores.softmax(0), seen, strict=True))
            torch.testing.assert_close(made[0][q, head], right, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(made[1][head, q].double(), scores.logsumexp(0), rtol=1e-5, atol=1e-6)


def test_a_target_that_cannot_be_captured_ends_the_start_and_names_the_field(rows: RowSource) -> None:
    target = Target(build(config_of("gemma2")), TAPS, CPU)
    target.uncapturable = "the flash kernel has no soft-capped attention"
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("aot_eager")
    maker.prepare(turn)
    shortcoming = turn.report().shortcoming("graph") or ""
    assert "soft-capped" in shortcoming
    assert "target.capture: false" in shortcoming


@pytest.mark.parametrize(
    ("chosen", "mode", "allowed_by"),
    [({"captures": False}, "eager", "target.capture: false"), ({"compiles": False}, "graph", "target.compile: false")],
)
def test_what_the_configuration_gives_up_is_allowed_and_said(
    chosen: dict[str, bool], mode: str, allowed_by: str, rows: RowSource
) -> None:
    target = Target(build(config_of("qwen3")), TAPS, CPU, attention="varlen")
    maker = FeatureMaker(target, rows.shape, **chosen)
    turn = graph_turn("aot_eager")
    captured: list[str] = turn._captured
    turn.capture = lambda name, function: captured.append(name) or function  # type: ignore[method-assign, func-returns-value]
    maker.prepare(turn)
    report = turn.report()
    assert (report.mode, report.compiled, report.allowed_by) == (mode, False, allowed_by)
    assert report.shortcoming("graph") is None
    assert allowed_by in report.describe()


def test_varlen_that_cannot_be_had_is_refused_by_its_field() -> None:
    with pytest.raises(TargetError, match=r"target\.attention: varlen can't be had: .*soft-capped.*; set it to auto"):
        Target(build(config_of("gemma2")), TAPS, CPU, attention="varlen")


def test_a_phase_refuses_a_target_that_nobody_let_run_slower() -> None:
    with CompilePhase("graph") as phase:
        with phase.turn("target 0", CPU) as turn:
            turn.runs_eagerly("its attention is not of the kind that can be captured")
        with pytest.raises(CompilationError, match="target 0: its attention is not of the kind"):
            phase.require_compiled()
