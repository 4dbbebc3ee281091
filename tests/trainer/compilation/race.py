"""Threads that compile at will, fifty times over, in a fresh process: `python race.py with-cure|without-cure`.

Each round starts a compilation and holds it inside its trace. Meanwhile one thread calls a function that was compiled
long before, and another makes an uncompiled flex_attention call, which waits for the compilation. Then the compilation
goes on. Prints how many rounds had an error in any call, and in how many a call failed afterwards, nobody tracing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch.nn.attention.flex_attention import flex_attention

from trainer.compilation.tracing import make_tracing_state_per_thread

ROUNDS = 50

if torch.version.cuda and not torch.cuda.is_available():
    # CUDA builds on a machine without a GPU crash in several compiling threads, whatever they compile.
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]

tracing, go_on = threading.Event(), threading.Event()


@torch.library.custom_op("dflash_race::pass_through", mutates_args=())
def pass_through(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pass_through.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if symbolic_trace.is_fx_tracing():  # of the calling thread or of any, as this torch has it
        tracing.set()
        assert go_on.wait(60)
    return torch.empty_like(x)


def waits_inside_flex_attention(thread: threading.Thread) -> bool:
    """Whether the thread is in flex_attention's inner compiled call, where it waits for the other compilation."""
    frame = sys._current_frames().get(thread.ident or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return {"flex_attention", "compile_wrapper"} <= names


def main() -> None:
    if sys.argv[1] == "with-cure":
        make_tracing_state_per_thread()
    torch._dynamo.config._config["recompile_limit"].default = 10 * ROUNDS  # of the eager flex calls
    settled = torch.compile(lambda x: x * 2, backend="aot_eager")
    settled(torch.ones(3))
    errors: list[str] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])

    rounds_with_errors = stuck_rounds = 0
    for number in range(ROUNDS):
        tracing.clear()
        go_on.clear()
        errors.clear()

        def fresh(x: torch.Tensor, number: int = number) -> torch.Tensor:
            return pass_through(x) + number

        compiled = torch.compile(fresh, backend="aot_eager", dynamic=False)
        query = torch.randn(1, 1, 32 + number, 16)
        first = threading.Thread(target=attempt, args=(lambda f=compiled: f(torch.ones(3)),))
        second = threading.Thread(target=attempt, args=(lambda: settled(torch.ones(3)),))
        third = threading.Thread(target=attempt, args=(lambda q=query: flex_attention(q, q, q),))
        first.start()
        while not tracing.wait(0.01) and first.is_alive():
            pass
        second.start()
        second.join()
        third.start()
        while third.is_alive() and not waits_inside_flex_attention(third):
            time.sleep(0.001)
        go_on.set()
        for thread in (first, third):
            thread.join()
        before = len(errors)
        attempt(lambda: settled(torch.ones(3)))
        stuck_rounds += len(errors) > before
        rounds_with_errors += bool(errors)
    print(f"{rounds_with_errors} {stuck_rounds} {errors[:1]}")


if __name__ == "__main__":
    main()
