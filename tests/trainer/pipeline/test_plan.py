"""Which row goes where, and who holds whom up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.plan import Plan, balance, describe, total_steps


@given(
    processes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    accumulate=st.integers(1, 3),
    start=st.integers(0, 4),
    more=st.integers(1, 4),
)
def test_every_row_goes_to_one_drafter_which_sees_its_rows_in_order(
    processes: list[int], accumulate: int, start: int, more: int
) -> None:
    everyone = sum(processes)
    seen: dict[int, list[tuple[int, int]]] = {drafter: [] for drafter in range(everyone)}
    first = 0
    for drafters in processes:
        plan = Plan(drafters, first, everyone, accumulate, start, start + more)
        for number in plan.rows():
            drafter, k = plan.place(number)
            assert 0 <= drafter < drafters
            seen[first + drafter].append((k, number))
        first += drafters
    rows = everyone * accumulate
    for drafter, places in seen.items():
        assert [k for k, _ in places] == list(range(more * accumulate))
        assert all(number % everyone == drafter for _, number in places)
        for step in range(more):
            taken = {number for _, number in places[step * accumulate : (step + 1) * accumulate]}
            assert taken <= set(range((start + step) * rows, (start + step + 1) * rows))


def test_rows_that_do_not_fill_a_step_are_left_out() -> None:
    assert total_steps(17, 4, None) == 4
    assert total_steps(17, 4, 3) == 3
    assert total_steps(3, 4, None) == 0


def test_the_bottleneck_is_the_side_with_the_least_rows_per_second() -> None:
    assert balance(0.001, 1.0, 1.0, 2, 1, False)["bottleneck"] == "drafters"
    assert balance(0.001, 3.0, 1.0, 2, 1, False)["bottleneck"] == "targets"
    assert balance(9.0, 3.0, 1.0, 2, 1, False)["bottleneck"] == "rows"
    assert balance(0.001, 0.0, 1.0, 2, 1, False)["bottleneck"] == "unknown"


def test_a_better_split_of_the_same_devices_is_proposed_with_what_it_brings() -> None:
    assert balance(0.0, 1.0, 3.0, 2, 2, False)["better_split"] == {"targets": 1, "drafters": 3, "speedup": 1.5}
    assert "better_split" not in balance(0.0, 1.0, 1.0, 2, 2, False)
    assert "better_split" not in balance(0.0, 1.0, 3.0, 2, 2, True)
    assert "better_split" not in balance(0.0, 1.0, 3.0, 1, 1, False)


def test_the_last_line_of_a_run_says_who_was_busy_and_what_would_be_faster() -> None:
    workers = {
        "target 0": {"busy": 0.31},
        "drafter 0": {"busy": 0.99},
        "balance": balance(0.0, 1.0, 3.0, 2, 2, False),
    }
    assert describe(workers) == (
        "busy: target 0 31 %, drafter 0 99 %; bottleneck: drafters; "
        "targets + drafters of 1 + 3 on the same devices would be 1.5 times as fast"
    )
