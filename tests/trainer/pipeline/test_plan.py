"""Rows and steps are dealt out as planned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.plan import RowPlan, total_steps


@given(
    processes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    accumulation=st.integers(1, 3),
    start=st.integers(0, 4),
    row=st.integers(0, 50),
    more=st.integers(1, 4),
)
def test_every_row_from_the_cursor_on_goes_to_one_drafter_which_sees_its_rows_in_order(
    processes: list[int], accumulation: int, start: int, row: int, more: int
) -> None:
    everyone = sum(processes)
    seen: dict[int, list[tuple[int, int]]] = {drafter: [] for drafter in range(everyone)}
    first = 0
    for drafters in processes:
        plan = RowPlan(drafters, first, everyone, accumulation, start, start + more, row)
        for planned in plan.rows():
            assert 0 <= planned.drafter < drafters
            assert not planned.held_out
            seen[first + planned.drafter].append((planned.k, planned.number))
        first += drafters
    rows = everyone * accumulation
    for drafter, places in seen.items():
        assert [k for k, _ in places] == list(range(more * accumulation))
        assert all(number % everyone == drafter for _, number in places)
        for step in range(more):
            taken = {number for _, number in places[step * accumulation : (step + 1) * accumulation]}
            assert taken <= set(range(row + step * rows, row + (step + 1) * rows))
    assert sorted(number for places in seen.values() for _, number in places) == list(range(row, row + more * rows))


def test_rows_that_do_not_fill_a_step_are_left_out() -> None:
    assert total_steps(17, 4, None) == 4
    assert total_steps(17, 4, 3) == 3
    assert total_steps(3, 4, None) == 0


def test_a_run_with_another_batch_makes_the_steps_that_its_remaining_rows_fill() -> None:
    assert total_steps(84, 2, None, step=72, row=72) == 78
    assert total_steps(84, 2, 75, step=72, row=72) == 75
    assert total_steps(84, 1, None, step=36, row=72) == 48
