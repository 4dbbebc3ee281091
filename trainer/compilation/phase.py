"""Lets each worker compile its step once, proves it fast, and forbids any later compilation.

Compilation is a phase. While it is open, each worker in turn compiles its functions for its device (`Turn.compile`),
runs them, and on CUDA captures them as graphs (`Turn.capture`); `CompilePhase.close` ends the phase, and from then on
any compilation in any thread is an error that names the function, the shapes and the worker. No other package touches
torch.compile, CUDA graphs, tracing state or the compile cache.

What this guards against, all seen with torch 2.11 to 2.15:

* torch 2.11 to 2.13 keep "FX is tracing" in a module global that every compiled call reads first, so a thread that
  merely calls its compiled step raises while another thread compiles (pytorch #126024), and one eager flex_attention
  call that overlaps a compilation leaves the flag up for ever. `make_tracing_state_per_thread` moves the flag into a
  threading.local, as torch 2.14 does itself (pytorch #168999).
* Dynamo keeps its cache, its recompile limit and its "run eagerly from now on" verdict on the code object, which
  threads share. `Turn.compile` gives every worker code objects of its own.
* Past the limit flex_attention silently runs unfused. While a phase lives, an unfused call raises.
* Since torch 2.12 a config override is seen by the thread that made it only. So none is made: what a worker needs is an
  argument of torch.compile.
* torch 2.13 and 2.14: eager BlockMask creation in two threads can leave an annotation in fx.traceback.current_meta
  that degrades later compilations and their cache entries. Masks are built inside the compiled step, never eagerly in
  a worker, and a phase refuses to compile under such a leftover.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.nn.attention.flex_attention as flex_module

from trainer.compilation.cache import start_compiler_processes
from trainer.compilation.errors import CompilationError, LateCompilationError
from trainer.compilation.report import CompileReport, Mode
from trainer.compilation.tracing import make_tracing_state_per_thread
from trainer.compilation.turn import Turn

_live = threading.Lock()  # held while a phase or the run after it lives
_unfused_call_is_an_error = False
_closed = False  # the phase is over and the run after it lives


class CompilePhase:
    """The compilation phase of one run: open until `close`; then closed until the context ends.

    Use as a context manager around the whole run. One phase lives in a process at a time.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.reports: list[CompileReport] = []
        self._turn = threading.Lock()

    def __enter__(self) -> CompilePhase:
        global _unfused_call_is_an_error
        if not _live.acquire(blocking=False):
            raise CompilationError("another run of this process has not ended: one compilation phase at a time")
        try:
            make_tracing_state_per_thread()
            _watch_unfused_flex_attention()
        except BaseException:
            _live.release()
            raise
        _unfused_call_is_an_error = True
        if self.mode != "eager" and torch.cuda.is_available():
            start_compiler_processes()
        return self

    def __exit__(self, *_: object) -> None:
        global _unfused_call_is_an_error, _closed
        if _closed:
            torch._dynamo.callback.callback_handler.remove_start_callback(_refuse_late_compilation)
            torch.compiler.set_stance("default")
            _closed = False
        _unfused_call_is_an_error = False
        _live.release()

    @contextmanager
    def turn(self, worker: str, device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[Turn]:
        """The calling thread's turn to compile; its report is in `reports` afterwards.

        The thread must be the one that will run the step: guards, autocast and stream state are a thread's own.
        """
        with self._turn:
            leftover = torch.fx.traceback.current_meta.get("custom")
            if leftover:
                raise CompilationError(
                    f"an eager BlockMask in another thread left {leftover} in torch's tracing metadata, which would "
                    "degrade the compiled backward: build block masks inside the compiled step only"
                )
            turn = Turn(worker, device, stream, self.mode)
            yield turn
            self.reports.append(turn.report())

    def require_compiled(self) -> None:
        """Raise unless every worker so far, target or drafter, got the path that the configuration asks for.

        Raises:
            CompilationError: naming each worker that did not, and why.
        """
        faults = [f"{report.worker}: {fault}" for report in self.reports if (fault := report.shortcoming(self.mode))]
        if faults:
            raise CompilationError(
                f"mode {self.mode} was asked for, but " + "; ".join(faults) + " (set pipeline.require_compiled: false "
                "to run slower all the same)"
            )

    def close(self) -> None:
        """End the phase: from now until the context ends, any compilation in any thread raises."""
        global _closed
        with self._turn:
            torch.compiler.set_stance("fail_on_recompile")
            torch._dynamo.callback.callback_handler.register_start_callback(_refuse_late_compilation)
            _closed = True


def _refuse_late_compilation(arguments: Any) -> None:
    """Dynamo's compile-start callback after the phase: catches what no stance does, such as a lazy backward."""
    raise LateCompilationError(
        f"{threading.current_thread().name}: a compilation ({arguments.callback_trigger.name}, "
        f"graph {arguments.compile_id}) began after the compilation phase"
    )


def _watch_unfused_flex_attention() -> None:
    """Hook the one name that flex_attention looks up on its eager, unfused path only (2.11 to 2.15)."""
    original = getattr(flex_module, "setup_compilation_env", None)
    if original is None:
        raise CompilationError(
            f"torch {torch.__version__}: flex_attention's eager path is not as expected, so an unfused call could not "
            "be noticed: this torch is not supported (2.11 to 2.15 are)"
        )
    if getattr(original, "_dflash", False):
        return

    def watched() -> Any:
        if _unfused_call_is_an_error:
            raise LateCompilationError(
                f"{threading.current_thread().name}: flex_attention was about to run uncompiled, which makes the full "
                "score matrix"
            )
        return original()

    watched._dflash = True  # type: ignore[attr-defined]
    flex_module.setup_compilation_env = watched  # type: ignore[attr-defined]
