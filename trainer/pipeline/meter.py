"""Measures how long a worker's device was busy.

On a CPU by the clock around the work. On CUDA by pairs of events on the worker's stream, since the host runs ahead:
the time between them is the device's, read once it is over and never waited for. Where several workers share a GPU, a
pair also counts what the others did between its two events.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Meter:
    """Counts one worker's busy seconds and rows; read from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._rows = 0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def busy(self, rows: int = 0) -> Iterator[None]:
        """Count the enclosed work, which is that of so many rows."""
        if self._device.type != "cuda":
            start = time.monotonic()
            yield
            with self._lock:
                self._seconds += time.monotonic() - start
                self._rows += rows
            return
        stream = torch.cuda.current_stream(self._device)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(stream)
        yield
        end.record(stream)
        with self._lock:
            self._rows += rows
            self._open.append((begin, end))

    def read(self) -> tuple[float, int]:
        """Busy seconds and rows so far."""
        with self._lock:
            while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
                begin, end = self._open.popleft()
                self._seconds += begin.elapsed_time(end) / 1000
            return self._seconds, self._rows
