"""Makes torch's tracing state per-thread; to be deleted with support for torch 2.13, the last that needs it.

torch 2.11 to 2.13 keep "FX is tracing" in a module global that every compiled call reads first, so a thread that merely
calls its compiled step raises while another thread compiles (pytorch #126024), and one eager flex_attention call that
overlaps a compilation leaves the flag up for ever. torch 2.14 keeps it in a threading.local itself (pytorch #168999).
"""

from __future__ import annotations

import inspect
import re
import threading
import types
from typing import Any, Literal

import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace

from trainer.compilation.errors import CompilationError


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
            f"{expected_uses}: this torch is not supported (2.11 to 2.15 are)"
        )
    old = function.__code__
    inherited = old.co_flags & __import__("__future__").annotations.compiler_flag
    module = compile("\n" * (first_line + start - 1) + source, old.co_filename, "exec", flags=inherited)
    new = next(code for code in module.co_consts if isinstance(code, types.CodeType) and code.co_name == old.co_name)
    if (new.co_varnames[: new.co_argcount], new.co_freevars) != (old.co_varnames[: old.co_argcount], old.co_freevars):
        raise CompilationError(f"torch {torch.__version__}: rewriting {function.__qualname__} changed its signature")
    return new.replace(co_qualname=old.co_qualname)
