"""What a run's numbers look like once written."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.sections import TelemetryConfig
from trainer.pipeline.types import HeldOutReport, StepReport
from trainer.run.telemetry import Telemetry, TelemetryError, checkpoint_metrics, held_out_line, status_line
from trainer.step.objective import slot_sums, summarise


def report(step: int, *, seed: int | None = None, total: int = 100, **changes: Any) -> StepReport:
    generator = torch.Generator().manual_seed(step if seed is None else seed)
    mask = torch.rand(5, 3, generator=generator) < 0.8
    nll = torch.rand(5, 3, generator=generator) * step
    sums = slot_sums(nll, nll, torch.rand(5, 3, generator=generator) < 0.5, mask, mask.float() * 0.7)
    summary = summarise(sums)
    values: dict[str, Any] = {
        "step": step,
        "total_steps": total,
        "epoch": 0,
        "loss": summary["loss"],
        "grad_norm": 1.0 * step,
        "lr": 1e-3 / step,
        "accept_length": summary["accept_length"],
        "slot_accuracy": summary["slot_accuracy"],
        "sums": sums,
        "tokens": 100 * step,
        "anchors": 5,
        "step_seconds": 0.5 * step,
        "tokens_per_second": 200.0,
        "anchors_per_second": 10.0 / step,
        "workers": {"target 0": {"busy": 0.5, "rows": step}, "bottleneck": "target"},
    }
    return StepReport(**(values | changes))


def telemetry(folder: Path, *, every: int = 3, start_step: int = 0, **options: Any) -> Telemetry:
    return Telemetry(folder, TelemetryConfig(every=every, **{"tensorboard": False, **options}), {}, start_step)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_step_is_on_disk_at_once_whatever_the_window(tmp_path: Path) -> None:
    sink = telemetry(tmp_path, every=1000)
    sink.step(report(1))
    (line,) = lines(tmp_path)
    assert next(iter(line)) == "kind"
    assert (line["kind"], line["step"], line["total_steps"]) == ("step", 1, 100)
    sink.close()


def test_a_line_is_written_per_window_and_for_the_last_step(tmp_path: Path) -> None:
    sink = telemetry(tmp_path, every=3)
    for step in range(1, 9):
        sink.step(report(step, total=8))
    sink.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 3, 6, 8]
    assert [line["steps"] for line in lines(tmp_path)] == [1, 2, 3, 2]


def test_closing_writes_the_steps_of_an_unfinished_window(tmp_path: Path) -> None:
    sink = telemetry(tmp_path, every=10)
    for step in (1, 2, 3):
        sink.step(report(step))
    sink.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]


def test_ratios_are_taken_of_pooled_sums_not_averaged(tmp_path: Path) -> None:
    sink = telemetry(tmp_path, every=4)
    reports = [report(step) for step in range(1, 5)]
    for each in reports:
        sink.step(each)
    sink.close()
    line = lines(tmp_path)[-1]
    pooled = sum(each.sums for each in reports[1:])
    assert isinstance(pooled, torch.Tensor)
    assert line["loss"] == pytest.approx(float(pooled[0] / pooled[1]))
    assert line["accept_length"] == pytest.approx(1 + float(pooled[4] / pooled[5]))
    assert line["slot_accuracy"] == pytest.approx((pooled[6:9] / pooled[9:12]).tolist())
    assert line["loss"] != pytest.approx(sum(each.loss for each in reports[1:]) / 3)  # they differ in weight
    assert line["tokens_per_second"] == pytest.approx((200 + 300 + 400) / (1.0 + 1.5 + 2.0))
    assert line["anchors_per_second"] == pytest.approx(15 / 4.5)
    assert line["step_seconds"] == pytest.approx(1.5)
    assert line["grad_norm"] == pytest.approx(3.0)
    assert line["lr"] == reports[-1].lr
    assert line["workers"] == reports[-1].workers


def test_a_number_json_has_no_word_for_is_null(tmp_path: Path) -> None:
    sink = telemetry(tmp_path)
    sink.step(dataclasses.replace(report(1), grad_norm=math.inf, sums=torch.zeros(12, dtype=torch.float64)))
    sink.close()
    (line,) = lines(tmp_path)
    assert line["grad_norm"] is None
    assert line["loss"] is None
    assert line["slot_accuracy"] == [None, None, None]


def test_a_resumed_run_appends_and_its_first_step_is_written_at_once(tmp_path: Path) -> None:
    first = telemetry(tmp_path)
    first.step(report(1))
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # killed in the middle of a line
    second = telemetry(tmp_path, every=10, start_step=4)
    second.event("resume", step=4)
    second.step(report(5))
    second.close()
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert texts[1] == '{"kind": "step", "st'
    assert [json.loads(text)["step"] for text in (texts[0], texts[2], texts[3])] == [1, 4, 5]
    assert json.loads(texts[2])["kind"] == "resume"


def test_a_checkpoint_notes_the_accepted_length_of_pooled_sums() -> None:
    pooled = report(1).sums + report(2).sums
    assert checkpoint_metrics(pooled)["accept_length"] == pytest.approx(1 + float(pooled[4] / pooled[5]))
    assert checkpoint_metrics(torch.zeros_like(pooled)).get("loss") is None  # no number that is not one


def test_tensorboard_receives_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = telemetry(tmp_path, every=1, tensorboard=True)
    reports = [report(step) for step in (1, 2, 3)]
    for each in reports:
        sink.step(each)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/accept_length", "slot_accuracy/3", "speed/tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([each.loss for each in reports])
    assert events.Scalars("workers/target 0/busy")[0].value == 0.5


def test_a_measurement_has_a_line_of_its_own_and_its_own_plots(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = telemetry(tmp_path, every=1, tensorboard=True)
    measured = HeldOutReport(step=2, loss=2.5, accept_length=1.75, rows=32, skipped_rows=0, seconds=3.0)
    sink.held_out(measured)
    sink.held_out(dataclasses.replace(measured, step=4, loss=math.nan))
    sink.close()
    first, second = lines(tmp_path)
    assert (first["kind"], first["step"], first["loss"], first["accept_length"]) == ("held_out", 2, 2.5, 1.75)
    assert second["loss"] is None
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("held_out/loss")] == [(2, 2.5)]
    assert [event.step for event in events.Scalars("held_out/accept_length")] == [2, 4]
    assert held_out_line(measured) == "step 2 held out: loss 2.500 accept 1.75, 32 rows"
    assert checkpoint_metrics(None, measured) == {"held_out_loss": 2.5, "held_out_accept_length": 1.75}


def test_weights_and_biases_is_offline_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    recorder = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values["train/grad_norm"])), finish=lambda: calls.append("finish")
    )

    def init(**options: Any) -> types.SimpleNamespace:
        calls.append((options["mode"], options["dir"]))
        return recorder

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sink = telemetry(tmp_path, wandb=True)
    sink.step(report(1))
    sink.close()
    assert calls == [("offline", str(tmp_path)), (1, 1.0), "finish"]


def test_weights_and_biases_that_is_not_installed_is_one_sentence_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TelemetryError, match=r"dflash-ops\[wandb\]"):
        telemetry(tmp_path, wandb=True)


@pytest.mark.parametrize(("rate", "text"), [(4321.0, "4.3k tok/s"), (87.2, "87 tok/s")])
def test_the_status_is_short_and_readable(rate: float, text: str) -> None:
    record = {"step": 12, "total_steps": 200, "loss": 3.2149, "accept_length": 1.8, "tokens_per_second": rate}
    assert status_line(record) == f"step 12/200 loss 3.215 accept 1.80 {text}"


def test_a_step_within_a_window_gives_no_record_and_the_windows_end_gives_the_pooled_one(tmp_path: Path) -> None:
    sink = telemetry(tmp_path, every=3)
    records = [sink.step(report(step)) for step in range(1, 4)]
    sink.close()
    assert records[1] is None
    written = [{k: v for k, v in line.items() if k != "kind"} for line in lines(tmp_path)]
    assert [records[0], records[2]] == written
