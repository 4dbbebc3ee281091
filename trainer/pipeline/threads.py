"""Sets the device, stream and autograd state of a thread that works on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def working_on(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Make `device` and a new stream of it the calling thread's own; yields the stream, None on a CPU.

    Backward stays in the thread: torch's own backward threads are one per device, shared by all drafters on it, and
    since torch 2.12 they see other compile settings than the thread that asked.
    """
    with torch.autograd.set_multithreading_enabled(False):
        if device.type != "cuda":
            yield None
            return
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield stream


def in_worker_thread(device: torch.device, work: Callable[[torch.cuda.Stream | None], T]) -> T:
    """Run `work` as a pipeline worker would run it, and return or raise what it does."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            with working_on(device) as stream:
                results.append(work(stream))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
