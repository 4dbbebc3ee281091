"""How is a worker's step compiled once, proven fast, and never compiled again?

Compilation is a phase. While it is open, each worker in turn compiles its functions for its device (`Turn.compile`),
runs them, and on CUDA captures them as graphs (`Turn.capture`); `CompilePhase.close` ends the phase, and from then on
any compilation in any thread is an error that names the function, the shapes and the worker. No other module touches
torch.compile, CUDA graphs, tracing state or the compile cache.

What this guards against, all seen with torch 2.11 to 2.14:

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

import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch._dynamo
import torch._inductor.metrics as inductor_metrics
import torch.fx._symbolic_trace as symbolic_trace
import torch.nn.attention.flex_attention as flex_module
from torch._dynamo.utils import counters

from trainer.config.sections import RunConfig
from trainer.drafter.config import DrafterConfig

Mode = Literal["graph", "compiled", "eager"]
P = ParamSpec("P")
R = TypeVar("R")

CACHE_VARIABLE = "DFLASH_COMPILE_CACHE"
# What the compiled code is made of; a release that changes other files keeps its cache.
COMPILED_SOURCES = (
    "compilation/phase.py",
    "drafter/attention.py",
    "drafter/blocks.py",
    "drafter/model.py",
    "step/objective.py",
    "step/step.py",
    "target/model.py",
)


class CompilationError(RuntimeError):
    """The step could not be compiled as the run demands; raised before the first optimizer step."""


class LateCompilationError(RuntimeError):
    """Something was compiled after the compilation phase."""


# ------------------------------------------------------------------------------------------- per-thread tracing state


class _TracingState(threading.local):
    flag = False


_FLAG = "_is_fx_tracing_flag"
_install_lock = threading.Lock()


def make_tracing_state_per_thread() -> Literal["native", "patched"]:
    """Give every thread its own "FX is tracing" flag where this torch keeps one for the process (2.11 to 2.13).

    The code objects of torch's four functions that read or write the flag are replaced in place, so every alias and
    closure that already holds one of the functions sees the change. To be deleted with support for torch 2.13.

    Raises:
        CompilationError: when torch's source is not as expected, or something is being traced right now.
    """
    if hasattr(symbolic_trace, "_is_fx_tracing_tls"):
        return "native"
    import torch._higher_order_ops.utils as operator_utils

    with _install_lock:
        if hasattr(symbolic_trace, "_dflash_tracing"):
            return "patched"
        if getattr(symbolic_trace, _FLAG, None) is not False:
            raise CompilationError(
                f"torch {torch.__version__}: FX tracing is under way or its flag is stuck or missing; "
                "the tracing state must be made per-thread before anything is traced"
            )
        # The uses of the flag in each function; another number means another torch than those this was written for.
        uses = [
            (inspect.unwrap(symbolic_trace.Tracer.trace), 3),
            (symbolic_trace.is_fx_tracing, 1),
            (symbolic_trace.is_fx_symbolic_tracing, 1),
            (inspect.unwrap(operator_utils._set_compilation_env), 3),
        ]
        rewritten = [(function, _code_with_thread_local_flag(function, count)) for function, count in uses]
        symbolic_trace._dflash_tracing = _TracingState()  # type: ignore[attr-defined]
        for function, code in rewritten:
            function.__code__ = code
        return "patched"


def _code_with_thread_local_flag(function: Any, expected_uses: int) -> types.CodeType:
    """The function's code, with every use of the global flag turned into one of `_dflash_tracing.flag`."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        raise CompilationError(f"torch {torch.__version__}: {function!r} is not the plain function that was expected")
    lines, first_line = inspect.getsourcelines(function)
    start = next(index for index, line in enumerate(lines) if line.lstrip().startswith("def "))
    indent = len(lines[start]) - len(lines[start].lstrip())
    body = [line[indent:] if line.strip() else "\n" for line in lines[start:]]
    source = "".join("\n" if line.strip() == f"global {_FLAG}" else line for line in body)
    source, uses = re.subn(rf"(?<![A-Za-z0-9_]){_FLAG}\b", "_dflash_tracing.flag", source)
    if uses != expected_uses:
        raise CompilationError(
            f"torch {torch.__version__}: {function.__qualname__} uses the tracing flag {uses} times, expected "
            f"{expected_uses}: this torch is not supported (2.11 to 2.14 are)"
        )
    old = function.__code__
    inherited = old.co_flags & __import__("__future__").annotations.compiler_flag
    module = compile("\n" * (first_line + start - 1) + source, old.co_filename, "exec", flags=inherited)
    new = next(code for code in module.co_consts if isinstance(code, types.CodeType) and code.co_name == old.co_name)
    if (new.co_varnames[: new.co_argcount], new.co_freevars) != (old.co_varnames[: old.co_argcount], old.co_freevars):
        raise CompilationError(f"torch {torch.__version__}: rewriting {function.__qualname__} changed its signature")
    return new.replace(co_qualname=old.co_qualname)


# ------------------------------------------------------------------------------------------------------ compile cache


@dataclass(frozen=True)
class CompileCache:
    """A folder of compiled kernels that belongs to one key.

    Inductor's and Triton's own keys keep it correct; ours keeps apart what can never be shared, so that an old driver's
    or an old trainer's kernels can be told from those in use and removed.
    """

    directory: Path
    key: Mapping[str, Any]

    @classmethod
    def open(cls, root: Path, device: torch.device, shapes: Mapping[str, Any]) -> CompileCache:
        """The cache under `root` for this software, this GPU type and these shapes; made when missing.

        Raises:
            CompilationError: the folder can't be written.
        """
        key = {**software_key(device), "shapes": dict(shapes)}
        text = json.dumps(key, indent=2, sort_keys=True, default=str) + "\n"
        cache = cls(root / hashlib.sha256(text.encode()).hexdigest()[:20], key)
        try:
            cache.directory.mkdir(parents=True, exist_ok=True)
            (cache.directory / "key.json").write_text(text)
        except OSError as error:
            raise CompilationError(
                f"compile cache {root} can't be written: {error.strerror}; set pipeline.compile_cache or "
                f"${CACHE_VARIABLE} to a writable folder"
            ) from error
        return cache

    @classmethod
    def of_run(cls, config: RunConfig, drafter: DrafterConfig, device: torch.device) -> CompileCache | None:
        """The cache of a run's drafters: below the configured folder, else $DFLASH_COMPILE_CACHE.

        None where neither is set: torch then uses its own default folder.
        """
        root = config.pipeline.compile_cache or os.environ.get(CACHE_VARIABLE)
        if not root:
            return None
        shapes = {
            "sequence_length": config.data.sequence_length,
            "anchors": config.data.anchors_per_row,
            "drafter": asdict(drafter),
            "objective": config.objective.model_dump(),
            "mode": config.pipeline.mode,
        }
        return cls.open(Path(root), device, shapes)

    def activate(self) -> None:
        """Make Inductor and Triton of this process use the folder; before the first compilation."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.directory / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(self.directory / "triton")

    def size(self) -> int:
        """Bytes in the folder."""
        return sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())


def software_key(device: torch.device) -> dict[str, str]:
    """What compiled code depends on beside its shapes."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    driver = Path("/proc/driver/nvidia/version")
    on_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "triton": triton,
        "driver": driver.read_text().splitlines()[0] if on_gpu and driver.exists() else "none",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "trainer": compiled_source_hash(),
    }


def compiled_source_hash() -> str:
    """A hash over the trainer's files that compiled code is made from."""
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for name in COMPILED_SOURCES:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


# --------------------------------------------------------------------------------------------------- compilation phase


@dataclass(frozen=True)
class CompileReport:
    """What one worker's turn made; written to compile.json."""

    worker: str
    device: str
    mode: Mode  # what the worker runs
    compiled: bool
    graphs: int  # compiled graphs (forward graphs; each may have a backward)
    kernels: int  # kernels generated by Inductor or loaded from its cache
    graph_breaks: int
    recompiles: int
    captured: list[str]  # CUDA graphs
    cache_hits: int
    cache_misses: int
    seconds: float
    note: str = ""

    def describe(self) -> str:
        """One line for people."""
        made = ""
        if self.mode != "eager":
            made = (
                f", {self.kernels} kernels, {self.graph_breaks} graph breaks, {self.recompiles} recompiles, "
                f"cache {self.cache_hits} hits {self.cache_misses} misses"
            )
        note = f" ({self.note})" if self.note else ""
        return f"{self.worker} on {self.device}: {self.mode}{made}, {self.seconds:.1f} s{note}"

    def shortcoming(self, wanted: Mode) -> str | None:
        """Why this is not the fast path that was asked for; None when it is."""
        if self.mode != wanted:
            return self.note or f"it runs {self.mode}, not {wanted}"
        if wanted == "eager":
            return None
        if not self.compiled:
            return self.note or "not every function was compiled"
        if self.graph_breaks:
            return f"{self.graph_breaks} graph breaks"
        if self.recompiles:
            return f"{self.recompiles} recompiles in the compilation phase"
        if not self.kernels:
            return "Inductor generated no kernel"
        if wanted == "graph" and not self.captured:
            return "no CUDA graph was captured"
        return None


def start_compiler_processes() -> None:
    """Let Inductor start the processes in which it compiles kernels, unless its cache holds some already.

    It would start them with the first kernel, and compile in the calling thread, one kernel after the other, for the
    seconds that they take to come up. Returns at once: they come up while the target is loaded.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not any(Path(cache_dir()).glob("fxgraph/*")):
        AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]


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
        self._required: set[str] = set()
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
    def turn(
        self, worker: str, device: torch.device, stream: torch.cuda.Stream | None = None, *, required: bool = True
    ) -> Iterator[Turn]:
        """The calling thread's turn to compile; its report is in `reports` afterwards.

        With `required`, `require_compiled` demands the phase's mode of this worker.

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
            if required:
                self._required.add(worker)

    def require_compiled(self) -> None:
        """Raise unless every required worker so far got the path that the run asked for.

        Raises:
            CompilationError: naming each worker that did not, and why.
        """
        faults = [
            f"{report.worker}: {fault}"
            for report in self.reports
            if report.worker in self._required and (fault := report.shortcoming(self.mode))
        ]
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


class Turn:
    """One worker's compilations and captures."""

    def __init__(self, worker: str, device: torch.device, stream: torch.cuda.Stream | None, mode: Mode) -> None:
        self._worker = worker
        self._device = device
        self._stream = stream
        self.mode: Mode = mode if mode != "graph" or device.type == "cuda" else "eager"
        self._note = "" if self.mode == mode else "there are no CUDA graphs on a CPU, so it runs eagerly"
        self._compiled: list[tuple[str, types.CodeType, bool]] = []
        self._captured: list[str] = []
        self._start = time.monotonic()
        self._before = _Counts.now()

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

    def runs_eagerly(self, reason: str) -> None:
        """Say that this worker neither compiles nor captures, and why; only before it has done so."""
        self.mode = "eager"
        self._note = reason

    def discard_compiled(self, reason: str) -> None:
        """Say that what was compiled so far is not used after all, and why."""
        self._compiled.clear()
        self._note = reason

    def report(self) -> CompileReport:
        """What this turn made so far."""
        made = _Counts.now() - self._before
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
        )


@dataclass(frozen=True)
class _Counts:
    """torch's process-wide counters; differences belong to a worker because turns do not overlap."""

    kernels: int
    graph_breaks: int
    autograd_hits: int
    autograd_misses: int
    inductor_hits: int
    inductor_misses: int

    @classmethod
    def now(cls) -> _Counts:
        inductor, autograd = counters["inductor"], counters["aot_autograd"]
        return cls(
            kernels=inductor_metrics.generated_kernel_count,
            graph_breaks=sum(counters["graph_break"].values()),
            autograd_hits=autograd["autograd_cache_hit"],
            autograd_misses=autograd["autograd_cache_miss"],
            inductor_hits=inductor["fxgraph_cache_hit"],
            inductor_misses=inductor["fxgraph_cache_miss"],
        )

    def __sub__(self, other: _Counts) -> _Counts:
        return _Counts(**{name: value - getattr(other, name) for name, value in asdict(self).items()})


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])


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


def _refuse_late_compilation(arguments: Any) -> None:
    """Dynamo's compile-start callback after the phase: catches what no stance does, such as a lazy backward."""
    raise LateCompilationError(
        f"{threading.current_thread().name}: a compilation ({arguments.callback_trigger.name}, "
        f"graph {arguments.compile_id}) began after the compilation phase"
    )


def _watch_unfused_flex_attention() -> None:
    """Hook the one name that flex_attention looks up on its eager, unfused path only (2.11 to 2.14)."""
    original = getattr(flex_module, "setup_compilation_env", None)
    if original is None:
        raise CompilationError(
            f"torch {torch.__version__}: flex_attention's eager path is not as expected, so an unfused call could not "
            "be noticed: this torch is not supported (2.11 to 2.14 are)"
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
