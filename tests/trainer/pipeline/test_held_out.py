"""Held-out rows are measured inside a run, and training does not notice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.launching import ranks
from trainer.pipeline.drafter_worker import DrafterWorker
from trainer.pipeline.plan import PlannedRow, RowPlan
from trainer.pipeline.target_worker import TargetWorker
from trainer.pipeline.types import StepReport
from trainer.step.step import DrafterStep

from . import tiny

ROWS = 5  # of a measurement


def config(*, every: int = 2, drafters: int = 1, **sections: Any) -> Any:
    data = {"held_out": "unused", "held_out_every": every, "held_out_rows": ROWS}
    return tiny.run_config(drafters=drafters, **{"data": data, **sections})


@pytest.mark.parametrize("drafters", [1, 2])
def test_training_is_the_same_to_the_last_bit_with_and_without_held_out_rows(drafters: int) -> None:
    accumulated = {"max_steps": 6, "lr": 1e-3, "gradient_accumulation_steps": 2}
    without, _ = tiny.train(tiny.run_config(drafters=drafters, optimizer=accumulated))
    measured, _ = tiny.train(config(drafters=drafters, optimizer=accumulated))
    assert [report.step for report in measured.held_out] == [2, 4, 6]
    assert measured.losses == without.losses
    assert [report.grad_norm for report in measured.steps] == [report.grad_norm for report in without.steps]
    assert [report.tokens for report in measured.steps] == [report.tokens for report in without.steps]
    old, new = without.saved[-1], measured.saved[-1]
    assert (old.row, old.tokens) == (new.row, new.tokens)
    for before, after in ((old.drafter, new.drafter), (old.optimizer, new.optimizer)):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_measurement_gives_what_training_on_these_rows_would_report_of_the_weights_before() -> None:
    recorder, _ = tiny.train(config(checkpoint={"every": 2}))
    assert [(report.step, report.rows, report.skipped_rows) for report in recorder.held_out] == [
        (2, ROWS, 0),
        (4, ROWS, 0),
        (6, ROWS, 0),
    ]
    for state, report in zip(recorder.saved, recorder.held_out, strict=True):
        trained, _ = tiny.train(
            tiny.run_config(optimizer={"max_steps": 1, "gradient_accumulation_steps": ROWS}),
            start=replace(state, step=0, row=0, schedule=None),
            source=tiny.row_source(config(), 1, epochs=1),
        )
        assert (report.loss, report.accept_length) == pytest.approx(
            (trained.steps[0].loss, trained.steps[0].accept_length), rel=1e-6
        )


@pytest.mark.parametrize("drafters", [2, 3, 7])
def test_several_drafters_pool_their_shares_of_the_held_out_rows(drafters: int) -> None:
    frozen = {"max_steps": 2, "lr": 1e-30}
    alone, _ = tiny.train(config(optimizer=frozen))
    several, _ = tiny.train(config(drafters=drafters, optimizer=frozen))
    (one,), (pooled,) = alone.held_out, several.held_out
    assert (pooled.loss, pooled.accept_length) == pytest.approx((one.loss, one.accept_length), rel=1e-6)


def test_a_resumed_run_measures_what_an_undisturbed_one_does() -> None:
    whole, _ = tiny.train(config(every=3, checkpoint={"every": 4}))
    assert [report.step for report in whole.held_out] == [3, 4, 6]
    resumed, _ = tiny.train(config(every=3, checkpoint={"every": 4}), start=whole.saved[0])
    assert resumed.losses == whole.losses[4:]
    (last,) = resumed.held_out
    assert (last.step, last.loss, last.accept_length) == (6, whole.held_out[-1].loss, whole.held_out[-1].accept_length)


def test_each_state_handed_over_by_steps_carries_its_own_measurement() -> None:
    recorder, _ = tiny.train(config(every=100, checkpoint={"every": 4}))
    assert [(state.step, state.held_out and state.held_out.step) for state in recorder.saved] == [(4, 4), (6, 6)]


def test_a_state_of_a_step_that_was_not_measured_carries_none() -> None:
    recorder, _ = tiny.train(config(every=5, optimizer={"max_steps": 60}), should_checkpoint=lambda: True)
    assert any(state.step > 5 and state.step % 5 for state in recorder.saved)
    for state in recorder.saved:
        assert (state.held_out.step if state.held_out is not None else None) == (None if state.step % 5 else state.step)


def test_a_held_out_row_whose_features_are_not_finite_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = TargetWorker._deliver
    damaged = iter([False] * 2 + [True] + [False] * 99)  # the first held-out row

    def broken(self: TargetWorker, features: Any, buffer: Any) -> Any:
        if next(damaged):
            features.hidden.fill_(float("nan"))
        return deliver(self, features, buffer)

    monkeypatch.setattr(TargetWorker, "_deliver", broken)
    recorder, _ = tiny.train(config(data={"held_out": "unused", "held_out_every": 2, "max_skipped_rows": 0}))
    assert [report.skipped_rows for report in recorder.held_out] == [1, 0, 0]
    assert all(report.loss > 0 for report in recorder.held_out)


def test_a_stop_cuts_a_measurement_short_which_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = threading.Event()
    measure, measured = DrafterWorker._measure, []

    def stopped(self: DrafterWorker) -> None:
        wanted.set()
        assert self.shared.stop_requested.wait(30)
        measure(self)

    monkeypatch.setattr(DrafterWorker, "_measure", stopped)
    monkeypatch.setattr(DrafterStep, "measure", lambda *arguments: measured.append(arguments))
    recorder, outcome = tiny.train(config(every=2, drafters=2), should_stop=wanted.is_set)
    assert (outcome.step, outcome.stopped) == (3, True)
    assert measured == recorder.held_out == []
    without, _ = tiny.train(tiny.run_config(drafters=2))
    assert recorder.losses == without.losses[:3]
    assert [(state.step, state.held_out) for state in recorder.saved] == [(3, None)]


def test_a_run_that_all_agreed_to_stop_does_not_measure_at_its_end() -> None:
    stop = threading.Event()
    recorder = tiny.Recorder()

    def on_step(report: StepReport) -> None:
        recorder.steps.append(report)
        stop.set()

    settings = config(every=1, drafters=2, optimizer={"max_steps": 100_000})
    _, outcome = tiny.train(settings, recorder, on_step=on_step, should_stop=stop.is_set)
    assert outcome.step == recorder.saved[-1].step == len(recorder.steps) < 100_000
    assert all(report.step < outcome.step for report in recorder.held_out)


def test_two_processes_measure_what_one_process_with_all_drafters_does(tmp_path: Path) -> None:
    program = "import sys, pathlib; from tests.trainer.pipeline import test_held_out; "
    program += "test_held_out.measure_in_this_process(pathlib.Path(sys.argv[1]))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / rank["RANK"])],
            env=os.environ | rank,
            cwd=Path(__file__).parents[3],
        )
        for rank in ranks(2)
    ]
    assert [process.wait(120) for process in processes] == [0, 0]
    together, _ = tiny.train(config(drafters=2))
    expected = [f"{report.step} {report.loss.hex()}" for report in together.held_out]
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text().split("\n") == expected


def measure_in_this_process(path: Path) -> None:
    recorder, _ = tiny.train(config())
    path.write_text("\n".join(f"{report.step} {report.loss.hex()}" for report in recorder.held_out))


def test_held_out_rows_are_planned_behind_the_steps_that_are_measured() -> None:
    plan = RowPlan(1, 1, 2, 1, start_step=3, total_steps=6, start_row=6, held_out_rows=3, measure_every=(4,))
    assert list(plan.rows()) == [
        PlannedRow(7, 0, 0),
        PlannedRow(1, 0, 1, held_out=True),
        PlannedRow(9, 0, 2),
        PlannedRow(11, 0, 3),
        PlannedRow(1, 0, 4, held_out=True),
    ]
    assert [plan.measures_after(step) for step in (4, 5, 6)] == [True, False, True]
    assert plan.held_out_rows_of(0) == 1
