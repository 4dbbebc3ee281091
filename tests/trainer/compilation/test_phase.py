"""The compilation phase: what it allows, what it refuses, what it reports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch._inductor.async_compile import AsyncCompile
from torch.nn.attention.flex_attention import flex_attention

from trainer.compilation import phase as compilation
from trainer.compilation.phase import (
    CompilationError,
    CompileCache,
    CompilePhase,
    CompileReport,
    LateCompilationError,
    make_tracing_state_per_thread,
    start_compiler_processes,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def race(cure: str) -> tuple[int, int]:
    """Rounds of fifty with an error, and with a flag that stayed up."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests/trainer/compilation/race.py"), cure],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    errors, stuck = result.stdout.split()[:2]
    return int(errors), int(stuck)


@pytest.mark.skipif(
    hasattr(symbolic_trace, "_is_fx_tracing_tls"), reason="this torch keeps its tracing state per thread by itself"
)
def test_without_the_cure_threads_that_compile_at_will_break_each_other_for_good() -> None:
    errors, stuck = race("without-cure")
    assert errors == 50
    assert stuck > 0


def test_with_the_cure_fifty_compilations_disturb_no_other_thread() -> None:
    assert race("with-cure") == (0, 0)


def test_a_rewritten_torch_function_keeps_its_name_signature_and_line_numbers() -> None:
    if make_tracing_state_per_thread() == "native":
        pytest.skip("this torch needs no rewriting")
    code = symbolic_trace.is_fx_symbolic_tracing.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    assert lines[code.co_firstlineno - 1].startswith("def is_fx_symbolic_tracing")
    assert not symbolic_trace.is_fx_symbolic_tracing()
    graph = symbolic_trace.symbolic_trace(torch.nn.Linear(2, 2))
    assert graph(torch.ones(1, 2)).shape == (1, 2)


def _uses_the_flag_once() -> bool:
    return _is_fx_tracing_flag  # type: ignore[name-defined] # noqa: F821


def test_another_source_of_torch_than_expected_is_refused_not_patched_halfway() -> None:
    with pytest.raises(CompilationError, match="uses the tracing flag 1 times, expected 3"):
        compilation._code_with_thread_local_flag(_uses_the_flag_once, 3)


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
        with phase.turn("target 0", CPU, required=False):
            pass
        with pytest.raises(CompilationError, match="drafter 0: there are no CUDA graphs on a CPU") as refusal:
            phase.require_compiled()
    assert "target 0" not in str(refusal.value)
    assert phase.reports[0].mode == "eager"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"mode": "compiled"}, "it runs compiled, not graph"),
        ({"compiled": False}, "not every function was compiled"),
        ({"graph_breaks": 2}, "2 graph breaks"),
        ({"kernels": 0}, "Inductor generated no kernel"),
        ({"captured": []}, "no CUDA graph was captured"),
    ],
)
def test_a_report_says_what_keeps_a_worker_from_the_fast_path(change: dict[str, object], fault: str | None) -> None:
    good: dict[str, object] = {
        "worker": "drafter 0",
        "device": "cuda:0",
        "mode": "graph",
        "compiled": True,
        "graphs": 3,
        "kernels": 40,
        "graph_breaks": 0,
        "recompiles": 0,
        "captured": ["forward"],
        "cache_hits": 0,
        "cache_misses": 3,
        "seconds": 1.0,
    }
    assert CompileReport(**{**good, **change}).shortcoming("graph") == fault  # type: ignore[arg-type]


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


def test_the_cache_is_kept_by_shapes_and_software_and_survives_a_change_of_other_trainer_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CompileCache.open(tmp_path, CPU, {"S": 64})
    (first.directory / "kernel").write_bytes(b"12345")
    assert CompileCache.open(tmp_path, CPU, {"S": 64}).directory == first.directory
    assert CompileCache.open(tmp_path, CPU, {"S": 128}).directory != first.directory
    assert first.size() == 5 + (first.directory / "key.json").stat().st_size
    # The sources that compiled code is made of, and no others, change the key.
    trainer = tmp_path / "trainer"
    for name in (*compilation.COMPILED_SOURCES, "telemetry.py", "drafter/released.py"):
        (trainer / name).parent.mkdir(parents=True, exist_ok=True)
        (trainer / name).write_text(name)
    monkeypatch.setattr(compilation, "__file__", str(trainer / "compilation" / "phase.py"))
    before = compilation.compiled_source_hash()
    (trainer / "telemetry.py").write_text("changed")
    (trainer / "drafter" / "released.py").write_text("changed")
    assert compilation.compiled_source_hash() == before
    (trainer / "drafter" / "model.py").write_text("changed")
    assert compilation.compiled_source_hash() != before


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CompilationError, match=r"can't be written: .*; set pipeline.compile_cache"):
        CompileCache.open(tmp_path / "file", CPU, {})


def test_inductor_s_processes_start_early_only_if_there_is_something_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: started.append(True))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    start_compiler_processes()
    assert started == [True]
    (tmp_path / "fxgraph" / "ab").mkdir(parents=True)
    start_compiler_processes()
    assert started == [True]
