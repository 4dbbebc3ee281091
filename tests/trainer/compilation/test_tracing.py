"""torch's tracing state, per thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace

from trainer.compilation import tracing
from trainer.compilation.errors import CompilationError
from trainer.compilation.tracing import make_tracing_state_per_thread

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
        tracing._code_with_thread_local_flag(_uses_the_flag_once, 3)
