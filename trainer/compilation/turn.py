"""Compiles one worker's functions under code objects of its own, and captures them as CUDA graphs."""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import torch
import torch._dynamo

from trainer.compilation.errors import LateCompilationError
from trainer.compilation.report import CompileReport, Counts, Mode

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """One worker's compilations and captures."""

    def __init__(self, worker: str, device: torch.device, stream: torch.cuda.Stream | None, mode: Mode) -> None:
        self._worker = worker
        self._device = device
        self._stream = stream
        self.asked: Mode = mode
        self.mode: Mode = mode if mode != "graph" or device.type == "cuda" else "eager"
        self._note = "" if self.mode == mode else "there are no CUDA graphs on a CPU, so it runs eagerly"
        self._allowed_by = ""
        self._compiled: list[tuple[str, types.CodeType, bool]] = []
        self._captured: list[str] = []
        self._start = time.monotonic()
        self._before = Counts.now()

    def compile(self, function: Callable[P, R], *, kinds: bool = False, backend: str = "inductor") -> Callable[P, R]:
        """`function` compiled whole, for one shape, under a code object of its own; in eager mode, `function` itself.

        Args:
            function: a plain function or a bound method. A graph break in it is an error.
            kinds: it is called with arguments of several kinds and shall have a graph for each. Else it shall have one
                graph, and a second one counts as a recompile.
            backend: torch.compile's; another than Inductor generates no kernels and does not count as compiled fast.
        """
        if self.mode == "eager":
            return function
        own = _own_code(function, self._worker)
        # A function made for this worker alone, hence one entry in Dynamo's cache for its whole life.
        compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
        code = own.__func__.__code__ if isinstance(own, types.MethodType) else own.__code__
        name = f"{function.__qualname__}"
        self._compiled.append((name, code, kinds))
        worker = self._worker

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return compiled(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                shapes = ", ".join(_describe(value) for value in (*args, *kwargs.values()))
                raise LateCompilationError(
                    f"{worker}: {name}({shapes}) would be compiled again after the compilation phase: {error}"
                ) from error

        return call

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, name: str, function: Callable[[], None]) -> Callable[[], None]:
        """`function` as a CUDA graph that replays on the worker's stream; without graphs, `function` itself.

        Graphs of one turn share memory, so they must be replayed in the order in which they were captured (a graph may
        be skipped or repeated). `function` must have run before, on the same stream. Capturing does not run it.
        """
        if self.mode != "graph":
            return function
        assert self._stream is not None, "a CUDA worker has a stream"
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may allocate while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        self._captured.append(name)
        return graph.replay

    def runs_eagerly(self, reason: str, *, allowed_by: str = "") -> None:
        """Say that this worker neither compiles nor captures, and why; only before it has done so.

        Args:
            allowed_by: the field that chose this; empty: nobody chose it, and a run that requires it does not start.
        """
        self.mode = "eager"
        self._note, self._allowed_by = reason, allowed_by

    def discard_compiled(self, reason: str, *, allowed_by: str = "") -> None:
        """Say that what was compiled so far is not used after all, and why; `allowed_by` as for `runs_eagerly`."""
        self._compiled.clear()
        self._note, self._allowed_by = reason, allowed_by

    def report(self) -> CompileReport:
        """What this turn made so far."""
        made = Counts.now() - self._before
        entries = [len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)) for _, code, _ in self._compiled]
        counted = list(zip(self._compiled, entries, strict=True))
        uncompiled = [name for (name, _, _), count in counted if not count]
        return CompileReport(
            worker=self._worker,
            device=str(self._device),
            mode=self.mode,
            compiled=bool(self._compiled) and not uncompiled,
            graphs=sum(entries),
            kernels=made.kernels,
            graph_breaks=made.graph_breaks,
            recompiles=sum(count - 1 for (_, _, kinds), count in counted if count and not kinds),
            captured=self._captured,
            # A hit in AOTAutograd's cache loads its Inductor graphs too; where it stands aside, Inductor's own counts.
            cache_hits=made.autograd_hits or made.inductor_hits,
            cache_misses=made.autograd_misses or made.inductor_misses,
            seconds=round(time.monotonic() - self._start, 3),
            note=f"not compiled: {', '.join(uncompiled)}" if uncompiled else self._note,
            allowed_by="" if uncompiled else self._allowed_by,
        )


def _own_code(function: Any, worker: str) -> Any:
    """A copy of a function or bound method whose code object, Dynamo's unit of caching, nobody else has."""
    if isinstance(function, types.MethodType):
        return types.MethodType(_own_code(function.__func__, worker), function.__self__)
    name = f"{function.__name__}_{re.sub(r'[^A-Za-z0-9]', '_', worker)}"
    copy = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    return copy


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
