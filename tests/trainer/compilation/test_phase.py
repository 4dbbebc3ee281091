"""The compilation phase: what it allows and what it refuses."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.trainer.compilation.test_tracing import _uses_the_flag_once
from trainer.compilation.errors import CompilationError, LateCompilationError
from trainer.compilation.phase import CompilePhase

CPU = torch.device("cpu")


def test_a_late_call_with_another_shape_names_function_shape_and_worker() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with CompilePhase("compiled") as phase:
        with phase.turn("drafter 7", CPU) as turn:
            compiled = turn.compile(scale, backend="aot_eager")
            compiled(torch.ones(4))
        phase.close()
        assert compiled(torch.full((4,), 3.0)).tolist() == [6.0] * 4
        with pytest.raises(LateCompilationError, match=r"drafter 7: .*scale\(float32\[5\]\)"):
            compiled(torch.ones(5))


def test_anything_else_that_compiles_after_the_phase_is_an_error_until_the_run_ends() -> None:
    with CompilePhase("compiled") as phase:
        phase.close()
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(3))
    assert torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(3)).tolist() == [2.0] * 3


def test_a_backward_that_would_be_compiled_late_is_an_error_naming_the_worker() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sin()

    caught: list[BaseException] = []

    def worker() -> None:
        with CompilePhase("compiled") as phase:
            with phase.turn("drafter 0", CPU) as turn:
                loss = turn.compile(square, backend="aot_eager")(torch.ones(3, requires_grad=True)).sum()
            phase.close()
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    loss.backward()
            except LateCompilationError as error:
                caught.append(error)

    thread = threading.Thread(target=worker, name="drafter 0")
    thread.start()
    thread.join()
    assert "drafter 0: a compilation (LAZY_BACKWARD" in str(caught[0])


def test_unfused_flex_attention_is_an_error_while_a_run_lives_and_only_then() -> None:
    query = torch.randn(1, 1, 16, 16)
    with CompilePhase("eager"), pytest.raises(LateCompilationError, match="MainThread: flex_attention"):
        flex_attention(query, query, query)
    assert flex_attention(query, query, query).shape == query.shape


def test_a_graph_break_is_an_error_in_the_phase() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with (
        CompilePhase("compiled") as phase,
        phase.turn("drafter 0", CPU) as turn,
        pytest.raises(torch._dynamo.exc.Unsupported),
    ):
        turn.compile(breaks, backend="aot_eager")(torch.ones(3))


def test_workers_share_no_code_object_so_their_compilations_are_counted_apart() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    with CompilePhase("compiled") as phase:
        for number in range(3):
            with phase.turn(f"drafter {number}", CPU) as turn:
                compiled = turn.compile(scale, backend="aot_eager")
                compiled(torch.ones(4 + number))
                compiled(torch.ones(4 + number))
    assert [(report.graphs, report.recompiles) for report in phase.reports] == [(1, 0)] * 3


def test_a_second_shape_within_the_phase_is_reported_as_a_recompile_and_refused() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 4

    with CompilePhase("compiled") as phase:
        with phase.turn("drafter 0", CPU) as turn:
            compiled = turn.compile(scale, backend="aot_eager")
            compiled(torch.ones(4))
            compiled(torch.ones(5))
        with pytest.raises(CompilationError, match="drafter 0: 1 recompiles"):
            phase.require_compiled()


def test_a_compiled_function_that_never_ran_compiled_is_refused_with_its_name() -> None:
    with CompilePhase("compiled") as phase:
        with phase.turn("drafter 0", CPU) as turn:
            turn.compile(_uses_the_flag_once)
        with pytest.raises(CompilationError, match="drafter 0: not compiled: _uses_the_flag_once"):
            phase.require_compiled()


def test_graphs_that_a_cpu_cannot_have_are_refused_when_required_and_said_otherwise() -> None:
    with CompilePhase("graph") as phase:
        with phase.turn("drafter 0", CPU):
            pass
        with phase.turn("target 0", CPU) as turn:
            turn.runs_eagerly("it was chosen", allowed_by="target.capture: false")
        with pytest.raises(CompilationError, match="drafter 0: there are no CUDA graphs on a CPU") as refusal:
            phase.require_compiled()
    assert "target 0" not in str(refusal.value)
    assert phase.reports[0].mode == "eager"


def test_a_phase_does_not_compile_under_annotations_that_an_eager_block_mask_left() -> None:
    torch.fx.traceback.current_meta["custom"] = {"fallback_to_eager": True}
    try:
        with (
            CompilePhase("compiled") as phase,
            pytest.raises(CompilationError, match="inside the compiled step only"),
            phase.turn("drafter 0", CPU),
        ):
            pass
    finally:
        del torch.fx.traceback.current_meta["custom"]


def test_two_runs_of_one_process_cannot_be_in_their_compilation_phase_at_once() -> None:
    with CompilePhase("eager"), pytest.raises(CompilationError, match="has not ended"):
        CompilePhase("eager").__enter__()
    with CompilePhase("eager"):
        pass
