"""What the service manager is told of a run's pace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.pipeline import tiny
from tests.trainer.run.test_telemetry import report
from trainer.run.notify import Notifier
from trainer.run.watch import LEAST_WATCHDOG_SECONDS, Watch


class Heard(Notifier):
    """Remembers the periods that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.periods: list[float | None] = []

    def expect_progress(self, seconds: float | None = None) -> None:
        self.periods.append(seconds)

    def expect_silence(self, seconds: float) -> None:
        self.periods.append(-seconds)


@pytest.mark.parametrize(("seconds", "period"), [(0.5, LEAST_WATCHDOG_SECONDS), (40.0, 800.0)])
def test_the_watchdogs_period_follows_the_slowest_measured_step(tmp_path: Path, seconds: float, period: float) -> None:
    notifier = Heard()
    signals: Any = SimpleNamespace(take_checkpoint_request=lambda: False, stop=False)
    watch = Watch(tmp_path, tiny.run_config(), {}, tiny.drafter_config(), None, notifier, signals)
    hooks = watch.hooks()
    hooks.on_step(report(1, step_seconds=9000.0))  # compiles
    for step in range(2, 21):
        hooks.on_step(report(step, step_seconds=seconds if step == 7 else seconds / 2))
    assert notifier.periods == [None, period]
