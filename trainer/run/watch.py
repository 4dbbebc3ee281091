"""Answers the pipeline's hooks: telemetry, checkpoints, sd_notify and signals."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.config.sections import RunConfig
from trainer.drafter.config import DrafterConfig
from trainer.pipeline.types import HeldOutReport, Hooks, StepReport, TrainState
from trainer.run import checkpoint
from trainer.run.notify import Notifier
from trainer.run.signals import Signals
from trainer.run.telemetry import Telemetry, checkpoint_metrics, held_out_line, pool, status_line

logger = logging.getLogger(__name__)


# Reading data, loading, compiling and saving are silences in which no step can prove progress.
START_SECONDS = 6 * 3600.0
SILENCE_SECONDS = 1800.0
# The watchdog's period, from measured steps: so many times the slowest one, but not less than the pauses that a busy
# disk or a machine that is looked after may cause.
SLOWEST_STEPS, LEAST_WATCHDOG_SECONDS = 20, 300.0
MEASURED_STEPS = 20
SLOWEST_ROWS = 3  # a held-out row takes no longer than a step, so a measurement has three times what it needs
METRICS_SECONDS = 2.0  # for the metrics of a step to be written before its checkpoint is


class Watch:
    """The caller's side of `Hooks`: telemetry, checkpoints, sd_notify, and the answers to signals.

    Without `telemetry` nothing is written: so it is in all processes but the first.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: RunConfig,
        noted: Mapping[str, Any],
        drafter_config: DrafterConfig,
        telemetry: Telemetry | None,
        notifier: Notifier,
        signals: Signals,
        measured_rows: int = 0,
    ) -> None:
        """`measured_rows`: held-out rows that a drafter measures between two steps."""
        self._run_dir = run_dir
        self._settings = settings
        self._noted = noted  # of the run, by each checkpoint
        self._drafter_config = drafter_config
        self._telemetry = telemetry
        self._notifier = notifier
        self._signals = signals
        self._measured_rows = measured_rows
        self._trained = 0  # steps
        self._slowest = 0.0  # seconds of a step, the first left out
        self._ending = False
        self._reported = 0  # the newest step whose metrics are written
        self._progress = threading.Condition()

    def hooks(self) -> Hooks:
        """What the pipeline calls."""
        return Hooks(
            on_status=self._on_status,
            on_compiled=self._on_compiled,
            on_step=self._on_step,
            on_held_out=self._on_held_out,
            on_failure=self._expect_the_end,
            should_stop=self._should_stop,
            should_checkpoint=self._signals.take_checkpoint_request,
            save=self._save,
        )

    def close(self) -> None:
        """Write what is pending."""
        if self._telemetry is not None:
            self._telemetry.close()

    def _on_status(self, text: str) -> None:
        if self._telemetry is not None:
            logger.info("%s", text)
        self._notifier.status(text)

    def _on_compiled(self, reports: list[dict[str, Any]]) -> None:
        if self._telemetry is None:
            return
        path = self._run_dir / "compile.json"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(reports, indent=2, default=str) + "\n")
        unfinished.replace(path)

    def _on_step(self, report: StepReport) -> None:
        if not self._trained:
            self._notifier.expect_progress()
            self._notifier.ready()
        else:
            self._slowest = max(self._slowest, report.step_seconds)
        self._trained += 1
        if self._trained % MEASURED_STEPS == 0 and not self._ending:
            self._notifier.expect_progress(self._watchdog_seconds())
        self._notifier.ping()
        self._notifier.status(status_line(pool([report])))
        if self._telemetry is not None and (record := self._telemetry.step(report)) is not None:
            logger.info("%s", status_line(record))
        with self._progress:
            self._reported = report.step
            self._progress.notify_all()

    def _on_held_out(self, report: HeldOutReport) -> None:
        self._notifier.ping()
        if self._telemetry is not None:
            self._telemetry.held_out(report)
            logger.info("%s", held_out_line(report))

    def _should_stop(self) -> bool:
        self._signals.training = True  # whoever asks will end the run in order
        if not self._signals.stop:
            return False
        self._expect_the_end()
        return True

    def _expect_the_end(self) -> None:
        """No step proves progress from now on: the watchdog must leave the time to save."""
        self._ending = True
        self._notifier.stopping()
        self._notifier.expect_silence(SILENCE_SECONDS)

    def _save(self, state: TrainState, sums: Tensor | None) -> None:
        # A run killed between a checkpoint and its step's metrics would resume behind a line that was never written.
        # Bounded, because a failing run may have no one left who writes them.
        with self._progress:
            self._progress.wait_for(lambda: self._reported >= state.step, timeout=METRICS_SECONDS)
        self._notifier.expect_silence(
            SILENCE_SECONDS
        )  # steps wait where one checkpoint is due before another is written
        path = checkpoint.save(
            self._run_dir / "checkpoints",
            state.step,
            model=state.drafter,
            optimizer=state.optimizer,
            drafter_config=self._drafter_config.to_json("float32"),
            run={
                "config": self._settings.model_dump(mode="json"),
                "next_row": state.row,
                "tokens": state.tokens,
                "schedule": asdict(state.schedule) if state.schedule is not None else None,
                **self._noted,
            },
            metrics=checkpoint_metrics(sums, state.held_out),
            keep=self._settings.checkpoint,
        )
        logger.info("checkpoint of step %d: %s", state.step, path)
        if not self._ending:
            self._notifier.expect_progress(self._watchdog_seconds())

    def _watchdog_seconds(self) -> float | None:
        """The period that the measured steps ask for; None before enough of them are measured."""
        if self._trained < MEASURED_STEPS:
            return None
        return max(LEAST_WATCHDOG_SECONDS, max(SLOWEST_STEPS, SLOWEST_ROWS * self._measured_rows) * self._slowest)
