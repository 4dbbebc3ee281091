"""Decides which row goes to which drafter, and how many steps a run has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which row goes where. M drafters in all processes; those of this process are numbers `first` and following."""

    drafters: int  # of this process
    first: int
    all_drafters: int  # M
    gradient_accumulation_steps: int
    start_step: int
    total_steps: int

    @property
    def rows_per_step(self) -> int:
        """Rows that all drafters consume in one optimizer step."""
        return self.all_drafters * self.gradient_accumulation_steps

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
