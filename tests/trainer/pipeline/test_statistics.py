"""Who held whom up, and what would be faster."""

from __future__ import annotations

from trainer.pipeline.statistics import balance, describe


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
