"""Holds what the threads of one run have in common, and ends them all at the first failure."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.compilation.phase import CompilePhase
from trainer.config.sections import RunConfig
from trainer.exchange.reduce import ExchangeError, GradientExchange
from trainer.pipeline.plan import PlannedRow, RowPlan
from trainer.pipeline.queues import Ring
from trainer.pipeline.types import HeldOutReport, StepReport, TrainState
from trainer.step.step import PreparedRow

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FeatureBuffer:
    """Static tensors on a drafter's device that one row's features are copied into."""

    hidden: Tensor  # [S, n*H]
    last_hidden: Tensor | None  # [S, H]
    finite: Tensor  # [] bool; False: the target's features were not, zeros stand in the buffer, the row is skipped
    read: torch.cuda.Event | None = None  # the drafter has copied the last row out


@dataclass(frozen=True, slots=True)
class Delivery:
    """A row whose features are, or on CUDA will be after `ready`, in a feature buffer of its drafter."""

    prepared: PreparedRow
    buffer: FeatureBuffer
    ready: torch.cuda.Event | None
    passed_over: bool = False  # a held-out row that a stop left without features


@dataclass
class Shared:
    """What the threads of one run have in common."""

    config: RunConfig
    plan: RowPlan
    phase: CompilePhase
    rows: Ring[tuple[PlannedRow, PreparedRow]]
    deliveries: list[Ring[Delivery]]  # one a drafter
    buffers: list[list[FeatureBuffer]]  # [drafter][place of its ring]
    checkpoints: Ring[tuple[TrainState, Tensor | None]] = field(default_factory=lambda: Ring(1))
    exchanges: list[GradientExchange] = field(default_factory=list)
    reports: queue.SimpleQueue[StepReport | HeldOutReport] = field(default_factory=queue.SimpleQueue)
    started: threading.Event = field(default_factory=threading.Event)
    ending: threading.Event = field(default_factory=threading.Event)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    checkpoint_requested: threading.Event = field(default_factory=threading.Event)
    failures: list[tuple[str, BaseException]] = field(default_factory=list)
    # What to save when the run fails: a state at a step boundary that no checkpoint holds yet, with its sums.
    unsaved: tuple[TrainState, Tensor | None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, worker: str, error: BaseException) -> None:
        """Log and note a failure, and end the run: everyone who waits, or will, gets `Closed`."""
        # The end of another process breaks the exchange first and is known a moment later: it is to be the error.
        level = logging.WARNING if isinstance(error, ExchangeError) else logging.ERROR
        log.log(level, "%s failed", worker, exc_info=error)
        with self._lock:
            self.failures.append((worker, error))
        self.end()

    def end(self) -> None:
        """End the run before its time, as `fail` does, for no failure."""
        self.ending.set()
        self.started.set()
        self.close_rings()
        self.checkpoints.close()
        for exchange in self.exchanges:
            exchange.abort()

    def close_rings(self) -> None:
        """End the rows and target workers, and drafters that wait for a row."""
        self.rows.close()
        for ring in self.deliveries:
            ring.close()
