"""Decides which row goes to which drafter, and how many steps a run has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which row goes where. M drafters in all processes; those of this process are numbers `first` and following.

    A run that resumes with another number of drafters goes on at the row it had come to, so rows are counted from
    `start_row` on and never computed from the number of the step alone.
    """

    drafters: int  # of this process
    first: int
    all_drafters: int  # M
    gradient_accumulation_steps: int
    start_step: int
    total_steps: int
    start_row: int

    @property
    def rows_per_step(self) -> int:
        """Rows that all drafters consume in one optimizer step."""
        return self.all_drafters * self.gradient_accumulation_steps

    def row_after(self, step: int) -> int:
        """The row that comes next once `step` is done, `start_step` <= step."""
        return self.start_row + (step - self.start_step) * self.rows_per_step

    def rows(self) -> Iterator[int]:
        """The global numbers of this process's rows, ascending. Row n belongs to drafter n mod M."""
        for number in range(self.start_row, self.row_after(self.total_steps)):
            if self.first <= number % self.all_drafters < self.first + self.drafters:
                yield number

    def place(self, number: int) -> tuple[int, int]:
        """The drafter of this process that row `number` goes to, and the how-manieth of its rows it is (0-based)."""
        return number % self.all_drafters - self.first, (number - self.start_row) // self.all_drafters


def total_steps(total_rows: int, rows_per_step: int, limit: int | None, *, step: int = 0, row: int = 0) -> int:
    """The last optimizer step of a run that has done `step` and comes to `row` next, and makes `limit` steps at most.

    Rows at the end that do not fill a step are left out.
    """
    steps = step + (total_rows - row) // rows_per_step
    return steps if limit is None else min(steps, limit)
