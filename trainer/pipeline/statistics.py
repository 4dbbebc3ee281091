"""Measures how busy the workers are, who holds the others up, and which split of the devices would be faster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.pipeline.shared import Shared
from trainer.pipeline.worker import Worker

WINDOW_SECONDS = 2.0  # of the busy times and queue occupancies in a step's report


class WorkerStatistics:
    """Busy time and occupancy of a run's workers, lately and since the start."""

    def __init__(self, shared: Shared, rows: Worker, targets: list[Worker], drafters: list[Worker]) -> None:
        self._shared, self._rows, self._targets, self._drafters = shared, rows, targets, drafters
        self._start = self._last = time.monotonic()
        self._before: dict[str, tuple[float, int]] = {}
        self._recent: dict[str, Any] = {}

    def recent(self) -> dict[str, Any]:
        """Over the latest window of at least `WINDOW_SECONDS`; empty before the first one is full."""
        now = time.monotonic()
        if now - self._last < WINDOW_SECONDS:
            return self._recent
        found = self._recent = self._describe(now - self._last, self._before)
        self._last = now
        self._before = {worker.name: worker.meter.read() for worker in self._all()}
        found["queues"] = {"rows": round(self._shared.rows.occupancy(), 3)} | {
            drafter.name: round(ring.occupancy(), 3)
            for drafter, ring in zip(self._drafters, self._shared.deliveries, strict=True)
        }
        return found

    def total(self) -> dict[str, Any]:
        """Since training began."""
        return self._describe(time.monotonic() - self._start, {})

    def restart(self) -> None:
        """Training begins now."""
        self._start = self._last = time.monotonic()

    def _all(self) -> list[Worker]:
        return [self._rows, *self._targets, *self._drafters]

    def _describe(self, seconds: float, before: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        per_row: dict[str, list[float]] = {"rows": [], "targets": [], "drafters": []}
        for side, workers in (("rows", [self._rows]), ("targets", self._targets), ("drafters", self._drafters)):
            for worker in workers:
                busy, rows = worker.meter.read()
                busy_before, rows_before = before.get(worker.name, (0.0, 0))
                busy, rows = busy - busy_before, rows - rows_before
                share = min(1.0, busy / seconds) if seconds > 0 else 0.0
                found[worker.name] = {
                    "device": str(worker.device),
                    "busy": round(share, 3),
                    "idle_seconds": round(max(0.0, seconds - busy), 4),
                    "rows": rows,
                    "row_seconds": round(busy / rows, 6) if rows else None,
                }
                if rows:
                    per_row[side].append(busy / rows)
        mean = {side: sum(values) / len(values) if values else 0.0 for side, values in per_row.items()}
        colocated = bool({str(w.device) for w in self._targets} & {str(w.device) for w in self._drafters} - {"cpu"})
        found["balance"] = balance(
            mean["rows"], mean["targets"], mean["drafters"], len(self._targets), len(self._drafters), colocated
        )
        return found


WORTH_SAYING = 1.05  # a split that is not at least this much faster is not proposed


def balance(
    row_seconds: float, target_seconds: float, drafter_seconds: float, targets: int, drafters: int, colocated: bool
) -> dict[str, Any]:
    """Who is the bottleneck, and which split of the same devices would serve better.

    Args:
        row_seconds, target_seconds, drafter_seconds: busy time per row of the row reader, of one target and of one
            drafter; 0 when not known yet.
        colocated: whether a device has both roles; then busy times overlap and no other split is proposed.
    """
    if not target_seconds or not drafter_seconds:
        return {"bottleneck": "unknown"}
    capacity = {"targets": targets / target_seconds, "drafters": drafters / drafter_seconds}
    if row_seconds:
        capacity["rows"] = 1 / row_seconds
    slowest = min(capacity, key=lambda side: capacity[side])
    found: dict[str, Any] = {"bottleneck": slowest, "rows_per_second_possible": capacity}
    devices = targets + drafters
    if colocated or devices < 3:
        return found
    best = max(range(1, devices), key=lambda count: min(count / target_seconds, (devices - count) / drafter_seconds))
    speedup = min(best / target_seconds, (devices - best) / drafter_seconds) / min(
        capacity["targets"], capacity["drafters"]
    )
    if speedup >= WORTH_SAYING:
        found["better_split"] = {"targets": best, "drafters": devices - best, "speedup": round(speedup, 2)}
    return found


def describe(workers: dict[str, Any]) -> str:
    """One line for the log: who was how busy, who held whom up, and which split would be faster."""
    busy = ", ".join(
        f"{name} {100 * found['busy']:.0f} %" for name, found in workers.items() if name not in ("balance", "queues")
    )
    found = workers["balance"]
    text = f"busy: {busy}; bottleneck: {found['bottleneck']}"
    if (better := found.get("better_split")) is not None:
        text += (
            f"; targets + drafters of {better['targets']} + {better['drafters']} on the same devices would be "
            f"{better['speedup']} times as fast"
        )
    return text
