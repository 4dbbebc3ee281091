"""Decides which row goes to which drafter, and how many steps a run has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row, the drafter of this process that it goes to, and its place among that drafter's rows, from 0."""

    number: int  # among the training rows, or among those held out
    drafter: int
    k: int
    held_out: bool = False


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
    held_out_rows: int = 0  # of all drafters, in each measurement; they are the same ones every time
    measure_every: tuple[int, ...] = ()  # a measurement follows each step that one of these divides, and the last step

    @property
    def rows_per_step(self) -> int:
        """Rows that all drafters consume in one optimizer step."""
        return self.all_drafters * self.gradient_accumulation_steps

    def row_after(self, step: int) -> int:
        """The row that comes next once `step` is done, `start_step` <= step."""
        return self.start_row + (step - self.start_step) * self.rows_per_step

    def rows(self) -> Iterator[PlannedRow]:
        """This process's rows in their order. Row n belongs to drafter n mod M, held-out rows too."""
        counts = [0] * self.drafters
        for step in range(self.start_step, self.total_steps):
            parts = [(False, range(self.row_after(step), self.row_after(step + 1)))]
            if self.measures_after(step + 1):
                parts.append((True, range(self.held_out_rows)))
            for held_out, numbers in parts:
                for number in numbers:
                    drafter = number % self.all_drafters - self.first
                    if 0 <= drafter < self.drafters:
                        yield PlannedRow(number, drafter, counts[drafter], held_out)
                        counts[drafter] += 1

    def measures_after(self, step: int) -> bool:
        """Whether all drafters measure the held-out rows once `step` is done."""
        due = step == self.total_steps or any(step % every == 0 for every in self.measure_every)
        return self.held_out_rows > 0 and due

    def held_out_rows_of(self, drafter: int) -> int:
        """Rows that a drafter of this process takes in each measurement."""
        return len(range(self.first + drafter, self.held_out_rows, self.all_drafters))


def total_steps(total_rows: int, rows_per_step: int, limit: int | None, *, step: int = 0, row: int = 0) -> int:
    """The last optimizer step of a run that has done `step` and comes to `row` next, and makes `limit` steps at most.

    Rows at the end that do not fill a step are left out.
    """
    steps = step + (total_rows - row) // rows_per_step
    return steps if limit is None else min(steps, limit)
