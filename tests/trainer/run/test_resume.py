"""A run and the checkpoint that it resumes from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.pipeline import tiny
from trainer.config.sections import RunConfig
from trainer.run.checkpoint import CheckpointError, WholeCheckpoint
from trainer.run.resume import differences, facts, refuse_later, resumed_schedule, target_digest
from trainer.step.optim import Schedule

NOW = {"the target's files": "t", "the data": "d", "rows an epoch": 10, "processes": 1, "drafters": 1, "rows a step": 1}


def started(folder: Path, step: int, **document: Any) -> WholeCheckpoint:
    (folder / "run.json").write_text(json.dumps(document))
    return WholeCheckpoint(folder, step, {})


@pytest.mark.parametrize(("then", "told"), [(2, []), (3, ["optimizer.gradient_accumulation_steps was 3, is 2"])])
def test_a_key_that_was_renamed_since_the_checkpoint_is_compared_under_its_new_name(then: int, told: list[str]) -> None:
    settings = tiny.run_config(optimizer={"gradient_accumulation_steps": 2})
    config = settings.model_dump(mode="json")
    del config["optimizer"]["gradient_accumulation_steps"]
    config["optimizer"]["accumulate"] = then
    assert differences({"config": config}, settings, NOW) == told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": {"dtype": "bfloat16"}}, "target.dtype was float32, is bfloat16"),
        ({"target": {"path": "other"}}, "target.path was unused, is other"),
        ({"optimizer": {"lr": 1e-4}}, "optimizer.lr was 0.001, is 0.0001"),
        ({"data": {"seed": 3}}, "data.seed was 0, is 3"),
        ({"objective": {"weighting": "uniform"}}, "objective.weighting was decay, is uniform"),
        ({"pipeline": {"mode": "compiled"}}, "pipeline.mode was eager, is compiled"),
    ],
)
def test_a_field_that_differs_is_told(change: dict[str, dict[str, Any]], told: str) -> None:
    before = {"config": tiny.run_config().model_dump(mode="json"), "facts": NOW}
    assert differences(before, tiny.run_config(**change), NOW) == [told]


def test_fields_that_change_no_loss_are_not_told() -> None:
    before = {"config": tiny.run_config().model_dump(mode="json"), "facts": NOW}
    changed = tiny.run_config(checkpoint={"every": 7}, telemetry={"every": 3}, pipeline={"queue_depth": 5})
    assert differences(before, changed, NOW) == []


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("the target's files", "u", "the target's files changed"),
        ("the data", "e", "the data changed"),
        ("rows an epoch", 12, "rows an epoch: 10 before, 12 now"),
        ("processes", 2, "processes: 1 before, 2 now"),
        ("drafters", 4, "drafters: 1 before, 4 now"),
    ],
)
def test_a_fact_that_differs_is_told(name: str, value: Any, told: str) -> None:
    before = {"config": tiny.run_config().model_dump(mode="json"), "facts": NOW}
    assert differences(before, tiny.run_config(), {**NOW, name: value}) == [told]


def test_another_target_of_the_same_shape_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    before = target_digest(str(tmp_path), None)
    assert target_digest(str(tmp_path), None) == before
    weights.write_bytes(bytes(50_000) + b"x" * 50_000)
    assert target_digest(str(tmp_path), None) != before
    assert target_digest("hub/name", SimpleNamespace(_commit_hash="abc")) == "abc"


def test_the_facts_of_a_run_are_those_that_are_compared() -> None:
    source = tiny.row_source(config := tiny.run_config())
    assert facts(config, source, None, 1, 1).keys() == NOW.keys()


def resumed(folder: Path, row: int, **optimizer: Any) -> tuple[WholeCheckpoint, RunConfig]:
    """A run of 100 rows, one a step, under a cosine, that came to `row`."""
    settings = tiny.run_config(optimizer={"max_steps": None, "warmup_ratio": 0.0, **optimizer})
    return started(folder, row, next_row=row, schedule={"rows": 100, "rows_per_step": 1}), settings


def test_another_batch_goes_on_along_the_checkpoints_schedule(tmp_path: Path) -> None:
    start, settings = resumed(tmp_path, 37)
    schedule = resumed_schedule(start, settings, rows_per_step=8, last_step=37 + 7)  # to row 93: 7 rows fill no step
    assert schedule == Schedule(100, 1)
    optimizer = settings.optimizer
    rates = [schedule.multiplier(row, optimizer) for row in (36, 37, 45)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] - rates[1] < 0.02


@pytest.mark.parametrize("last_step", [60, 300])
def test_a_learning_rate_that_would_jump_is_refused_with_both_rates_and_the_cure(
    tmp_path: Path, last_step: int
) -> None:
    start, settings = resumed(tmp_path, 50)
    with pytest.raises(CheckpointError, match=r"jump from 0\.00055 to .*Set optimizer\.on_schedule_change to keep"):
        resumed_schedule(start, settings, rows_per_step=1, last_step=last_step)


def test_a_jump_that_was_accepted_is_made_or_avoided_as_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for wish, expected in (("keep", Schedule(100, 1)), ("adopt", Schedule(300, 1))):
        start, settings = resumed(tmp_path, 50, on_schedule_change=wish)
        assert resumed_schedule(start, settings, rows_per_step=1, last_step=300) == expected
        assert "learning rate at row 50: 0.00055 by the checkpoint's schedule, 0.00094 by this run's" in caplog.text


def test_another_end_that_makes_no_jump_is_adopted(tmp_path: Path) -> None:
    start, settings = resumed(tmp_path, 50, schedule="wsd")
    assert resumed_schedule(start, settings, rows_per_step=1, last_step=300) == Schedule(300, 1)


def test_a_checkpoint_behind_the_runs_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"at row 50, past this run's 40 rows: raise data\.epochs"):
        refuse_later(started(tmp_path, 50, next_row=50), 40, 50)
    with pytest.raises(CheckpointError, match=r"step 50, past this run's last step 30: raise optimizer\.max_steps"):
        refuse_later(started(tmp_path, 50, next_row=50), 100, 30)
    refuse_later(started(tmp_path, 50, next_row=50), 100, 50)
