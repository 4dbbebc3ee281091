"""Writes a run's numbers: to metrics.jsonl always, to TensorBoard and Weights & Biases when asked.

Numerators and denominators are pooled over the steps of a window before a ratio is taken, so that a line covers all of
its steps alike. The first step of a process is written at once, for those who wait for a sign of life.

metrics.jsonl is append-only, one JSON object a line, `kind` first. A run that was killed and resumed writes the steps
since its checkpoint again after a line of kind `resume`: of two lines with one step the later holds.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.config.sections import TelemetryConfig
from trainer.pipeline.types import HeldOutReport, StepReport
from trainer.step.objective import summarise
from trainer.wording import count, finite


class TelemetryError(Exception):
    """A metrics sink that was asked for can't be had; the message says what to do."""


class Sink(Protocol):
    """One more place where numbers go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values`, by name, at `step`."""

    def close(self) -> None:
        """Flush."""


class Telemetry:
    """Pools step reports and writes a line for each window. For one thread."""

    def __init__(self, run_dir: Path, config: TelemetryConfig, settings: Mapping[str, Any], start_step: int) -> None:
        """Open the sinks; `settings` describes the run to those that record one, `start_step` is where it goes on.

        Raises:
            TelemetryError: when a sink's package is missing.
            OSError: when metrics.jsonl can't be opened.
        """
        self._every = config.every
        self._window: list[StepReport] = []
        self._wrote_first = False
        path = run_dir / "metrics.jsonl"
        self._file = path.open("a", buffering=1)
        if not _ends_with_newline(path):  # a kill in the middle of a line: what follows must not be glued to it
            self._file.write("\n")
        self._sinks: list[Sink] = []
        if config.tensorboard:
            self._sinks.append(_TensorBoard(run_dir / "tensorboard", start_step))
        if config.wandb:
            self._sinks.append(_WeightsAndBiases(run_dir, settings))

    def event(self, kind: str, **fields: Any) -> None:
        """Write a line that is no step: `{"kind": kind, "time": now, ...}`."""
        self._write({"kind": kind, "time": time.time(), **fields})

    def step(self, report: StepReport) -> dict[str, Any] | None:
        """Take in a finished step; writes when the window is full, and always the first and the last step.

        Returns what it wrote, see `pool`.
        """
        self._window.append(report)
        if self._wrote_first and report.step % self._every and report.step != report.total_steps:
            return None
        self._wrote_first = True
        return self._flush()

    def held_out(self, report: HeldOutReport) -> None:
        """Write a line of kind `held_out`, and the same to every sink."""
        self.event("held_out", **asdict(report))
        values = {"held_out/loss": report.loss, "held_out/accept_length": report.accept_length}
        for sink in self._sinks:
            sink.write(report.step, {name: value for name, value in values.items() if math.isfinite(value)})

    def close(self) -> None:
        """Write what the window holds and close every sink."""
        if self._window:
            self._flush()
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _flush(self) -> dict[str, Any]:
        reports, self._window = self._window, []
        record = pool(reports)
        self._write({"kind": "step", **record})
        if self._sinks:
            values = scalars(record)
            for sink in self._sinks:
                sink.write(record["step"], values)
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(record)) + "\n")


def pool(reports: list[StepReport]) -> dict[str, Any]:
    """One record for consecutive steps: sums are added, then divided; `step`, `epoch`, `lr`, `workers` are the last's.

    `grad_norm` and `step_seconds` are means over the steps; rates are totals over the time that the steps took.
    """
    last = reports[-1]
    summary = summarise(torch.stack([report.sums for report in reports]).sum(0))
    seconds = sum(report.step_seconds for report in reports)
    return {
        "step": last.step,
        "total_steps": last.total_steps,
        "epoch": last.epoch,
        "time": time.time(),
        "steps": len(reports),
        **{name: summary[name] for name in ("loss", "nll", "accuracy", "accept_length")},
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": last.lr,
        "tokens_per_second": sum(report.tokens for report in reports) / seconds if seconds else math.nan,
        "anchors_per_second": sum(report.anchors for report in reports) / seconds if seconds else math.nan,
        "step_seconds": seconds / len(reports),
        "slot_accuracy": summary["slot_accuracy"],
        "workers": last.workers,
        "skipped_rows": last.skipped_rows,
    }


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a `pool` record by the names that plots use."""
    groups = {
        "train": ("loss", "nll", "accuracy", "accept_length", "grad_norm", "lr", "epoch"),
        "speed": ("tokens_per_second", "anchors_per_second", "step_seconds"),
    }
    values = {f"{group}/{name}": record[name] for group, names in groups.items() for name in names}
    values |= {f"slot_accuracy/{slot}": value for slot, value in enumerate(record["slot_accuracy"], start=1)}
    for worker, facts in record["workers"].items():
        if isinstance(facts, Mapping):
            values |= {f"workers/{worker}/{name}": value for name, value in facts.items()}
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def checkpoint_metrics(sums: Tensor | None, held_out: HeldOutReport | None = None) -> dict[str, float]:
    """What a checkpoint notes of the steps since the one before, by their pooled slot sums, and of its own weights."""
    values: dict[str, Any] = dict(summarise(sums)) if sums is not None else {}
    if held_out is not None:
        values |= {"held_out_loss": held_out.loss, "held_out_accept_length": held_out.accept_length}
    return {name: value for name, value in values.items() if isinstance(value, float) and math.isfinite(value)}


def status_line(record: Mapping[str, Any]) -> str:
    """`step 12/200 loss 3.215 accept 1.80 4.3k tok/s` of a `pool` record, for logs and the service manager."""
    rate = record["tokens_per_second"]
    speed = f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"
    progress = f"step {record['step']}/{record['total_steps']}"
    return f"{progress} loss {record['loss']:.3f} accept {record['accept_length']:.2f} {speed} tok/s"


def held_out_line(report: HeldOutReport) -> str:
    """`step 200 held out: loss 2.310 accept 2.41, 32 rows`, for the log."""
    skipped = f", {report.skipped_rows} left out for features that are not finite" if report.skipped_rows else ""
    text = f"step {report.step} held out: loss {report.loss:.3f} accept {report.accept_length:.2f}"
    return f"{text}, {count(report.rows, 'row')}{skipped}"


class _TensorBoard:
    def __init__(self, folder: Path, start_step: int) -> None:
        # Imported here: it takes a second that a run without it need not spend.
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run had written past its checkpoint is hidden from plots.
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TelemetryError(
                "telemetry.wandb needs the package wandb: install dflash-ops[wandb], or set telemetry.wandb to false"
            ) from error
        self._run = wandb.init(
            project="dflash",
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")
