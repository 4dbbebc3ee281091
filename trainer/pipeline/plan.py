"""Who does what, and who holds the others up? Arithmetic on numbers of rows, workers and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WORTH_SAYING = 1.05  # a split that is not at least this much faster is not proposed


@dataclass(frozen=True, slots=True)
class Plan:
    """Which row goes where. M drafters in all processes; those of this process are numbers `first` and following."""

    drafters: int  # of this process
    first: int
    all_drafters: int  # M
    accumulate: int
    start_step: int
    total_steps: int

    @property
    def rows_per_step(self) -> int:
        """Rows that all drafters consume in one optimizer step."""
        return self.all_drafters * self.accumulate

    def rows(self) -> Iterator[int]:
        """The global numbers of this process's rows, ascending. Row n belongs to drafter n mod M."""
        for number in range(self.start_step * self.rows_per_step, self.total_steps * self.rows_per_step):
            if self.first <= number % self.all_drafters < self.first + self.drafters:
                yield number

    def place(self, number: int) -> tuple[int, int]:
        """The drafter of this process that row `number` goes to, and the how-manieth of its rows it is (0-based)."""
        start = self.start_step * self.rows_per_step
        return number % self.all_drafters - self.first, (number - start) // self.all_drafters


def total_steps(total_rows: int, rows_per_step: int, limit: int | None) -> int:
    """Optimizer steps of a run; rows at the end that do not fill a step are left out."""
    steps = total_rows // rows_per_step
    return steps if limit is None else min(steps, limit)


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
