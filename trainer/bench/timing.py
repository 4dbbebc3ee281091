"""Times work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch


def synchronise(device: torch.device) -> None:
    """Wait for a device, if it is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[int], object], steps: int, wait: Callable[[], object], *, warm_up: int = 3) -> float:
    """Seconds that `steps` calls `work(number)`, issued back to back, take after `warm_up` untimed ones.

    `wait` returns when the device has done what was issued.
    """
    for number in range(warm_up):
        work(number)
    wait()
    start = time.perf_counter()
    for number in range(steps):
        work(number)
    wait()
    return time.perf_counter() - start


def milliseconds(
    pieces: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, *, warm_up: int = 2
) -> dict[str, float]:
    """Mean milliseconds of each piece when all are run in their order, by events on the current stream."""
    times = dict.fromkeys(pieces, 0.0)
    for repeat in range(warm_up + repeats):
        marks = [_mark(device)]
        for piece in pieces.values():
            piece()
            marks.append(_mark(device))
        synchronise(device)
        if repeat >= warm_up:
            for name, (one, other) in zip(pieces, pairwise(marks), strict=True):
                times[name] += _between(one, other) / repeats
    return times


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _between(one: Any, other: Any) -> float:
    """Milliseconds."""
    return float(1e3 * (other - one) if isinstance(one, float) else one.elapsed_time(other))
