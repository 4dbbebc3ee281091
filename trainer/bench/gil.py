"""Measures how long a thread waits for the GIL.

A probe thread sleeps for a millisecond, again and again, and notes by how much it overslept. A sleeper needs
the GIL to go on, so what it oversleeps more than on the idle process is the time that a worker, too, waits for the GIL
after each blocking call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np


class GilProbe(threading.Thread):
    """Notes by how much a sleep of a millisecond oversleeps; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__(name="gil probe", daemon=True)
        self._stop_asked = threading.Event()
        self.overslept: list[float] = []

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stop_asked.is_set():
            start = time.perf_counter()
            time.sleep(0.001)
            self.overslept.append(time.perf_counter() - start - 0.001)

    def finish(self) -> dict[str, float]:
        """Stop; microseconds overslept."""
        self._stop_asked.set()
        self.join()
        return in_microseconds(self.overslept)

    @classmethod
    def of_idle_process(cls) -> dict[str, float]:
        """What a sleep oversleeps when nobody else runs."""
        probe = cls()
        probe.start()
        time.sleep(0.3)
        return probe.finish()


def in_microseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and 99th percentile."""
    values = np.array(seconds) * 1e6
    return {"mean": round(float(values.mean()), 1), "p99": round(float(np.quantile(values, 0.99)), 1)}
