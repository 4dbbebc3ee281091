"""What does each thread of the pipeline do?

rows        reads rows from the source and prepares them
target i    runs the target over the next row and copies the features to the drafter that the row belongs to
drafter j   trains on its rows in their order; drafter 0 also reports and hands over checkpoints
checkpoint  writes them, while training goes on

A worker never waits without a way to be woken: all waits are on rings and barriers that `Shared.fail` closes. On CUDA
nothing on the hot path waits for a device, but for one thing: a drafter's host may run at most `RUN_AHEAD` steps ahead
of its device, and it waits on the event of that older step.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.compilation.phase import CompilePhase
from trainer.config.sections import RunConfig
from trainer.data.rows import RowShape, RowSource
from trainer.drafter.config import DrafterConfig
from trainer.exchange.reduce import Exchange, ExchangeError
from trainer.pipeline.meter import Meter
from trainer.pipeline.plan import Plan, balance
from trainer.pipeline.queues import Closed, Ring
from trainer.pipeline.threads import working_on
from trainer.pipeline.types import StepReport, TrainState
from trainer.step.optim import schedule_multiplier
from trainer.step.step import DrafterStep, PreparedRow, StepNumbers
from trainer.target.features import FeatureMaker
from trainer.target.model import Features, Target

log = logging.getLogger(__name__)

# Steps that may be under way on a CUDA device when the next one is enqueued. A stop that is noticed in step s therefore
# takes effect after step s + RUN_AHEAD - 1, in every drafter of every process alike.
RUN_AHEAD = 2
WINDOW_SECONDS = 2.0  # of the busy times and queue occupancies in a step's report


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not a finite number."""


@dataclass(slots=True)
class Place:
    """Static buffers on a drafter's device that one row's features are copied into."""

    hidden: Tensor  # [S, n*H]
    last_hidden: Tensor | None  # [S, H]
    read: torch.cuda.Event | None = None  # the drafter has copied the last row out


@dataclass(frozen=True, slots=True)
class Delivery:
    """A row whose features are, or on CUDA will be after `ready`, in a place of its drafter."""

    prepared: PreparedRow
    place: Place
    ready: torch.cuda.Event | None


@dataclass
class Shared:
    """What the threads of one run have in common."""

    config: RunConfig
    plan: Plan
    phase: CompilePhase
    rows: Ring[PreparedRow]
    deliveries: list[Ring[Delivery]]  # one a drafter
    places: list[list[Place]]  # [drafter][place of its ring]
    checkpoints: Ring[tuple[TrainState, Tensor | None]] = field(default_factory=lambda: Ring(1))
    exchanges: list[Exchange] = field(default_factory=list)
    reports: queue.SimpleQueue[StepReport] = field(default_factory=queue.SimpleQueue)
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


class Worker(threading.Thread):
    """A thread that prepares when told, works when all are prepared, and never dies unseen."""

    def __init__(self, name: str, shared: Shared, device: torch.device) -> None:
        super().__init__(name=name, daemon=True)  # a thread stuck in a driver must not keep the process alive
        self.shared = shared
        self.device = device
        self.meter = Meter(device)
        self.stream: torch.cuda.Stream | None = None
        self.may_prepare = threading.Event()
        self.prepared = threading.Event()
        self.saving = threading.Event()  # a state is on its way to a checkpoint: at the end, worth more patience

    def run(self) -> None:
        """Prepare, wait for the others, work; hand any exception to the supervisor."""
        try:
            with working_on(self.device) as self.stream:
                self.may_prepare.wait()
                self._go_on()
                self.prepare()
                self.prepared.set()
                self.shared.started.wait()
                self._go_on()
                self.work()
        except Closed:
            pass
        except BaseException as error:
            self.shared.fail(self.name, error)
        finally:
            self.prepared.set()
            try:
                self.end()
            except Exception as error:  # peers are gone, or the device: what there was to say has been said
                log.warning("%s did not end cleanly: %s", self.name, error)

    def prepare(self) -> None:
        """Build and compile; one worker at a time."""

    def work(self) -> None:
        """Work until there is no more, or `Closed`."""
        raise NotImplementedError

    def end(self) -> None:
        """Give back what would outlive the thread."""

    def _go_on(self) -> None:
        if self.shared.ending.is_set():
            raise Closed


class RowWorker(Worker):
    """Reads rows ahead of the targets."""

    def __init__(self, shared: Shared, source: RowSource, block_size: int, *, pin: bool) -> None:
        super().__init__("rows", shared, torch.device("cpu"))
        self._source, self._block_size, self._pin = source, block_size, pin

    def work(self) -> None:
        count = 0
        for number in self.shared.plan.rows():
            self.shared.rows.reserve(count)
            with self.meter.busy(rows=1):
                prepared = self._read(number)
            self.shared.rows.put(count, prepared)
            count += 1
        self.shared.rows.finish(count)

    def _read(self, number: int) -> PreparedRow:
        return PreparedRow.of(self._source.row(number), self._block_size, pin=self._pin)


class TargetWorker(Worker):
    """Runs the target; whichever target is free takes the next row."""

    def __init__(self, number: int, shared: Shared, target: Target, shape: RowShape) -> None:
        super().__init__(f"target {number}", shared, target.device)
        self._maker = FeatureMaker(target, shape, compiles=shared.config.target.compile)
        self._copies: torch.cuda.Stream | None = None

    def prepare(self) -> None:
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with self.shared.phase.turn(self.name, self.device, self.stream, required=False) as turn:
            self._maker.prepare(turn)

    def work(self) -> None:
        shared = self.shared
        while (taken := shared.rows.take()) is not None:
            count, prepared = taken
            shared.rows.release(count)
            drafter, k = shared.plan.place(prepared.row.number)
            ring = shared.deliveries[drafter]
            place = shared.places[drafter][ring.reserve(k)]
            with self.meter.busy(rows=1):
                features = self._maker.make(prepared.row)
                ready = self._deliver(features, place)
            ring.put(k, Delivery(prepared, place, ready))

    @torch.no_grad()
    def _deliver(self, features: Features, place: Place) -> torch.cuda.Event | None:
        """Copy features into a drafter's place; on CUDA on a side stream, after those who have to be first."""
        if self._copies is None or self.stream is None:
            _copy(features, place)
            return None
        self._copies.wait_stream(self.stream)
        if place.read is not None:
            self._copies.wait_event(place.read)
        with torch.cuda.stream(self._copies):
            _copy(features, place)
            ready: torch.cuda.Event = self._copies.record_event()
        # The features' memory is this worker's again once they are copied.
        self.stream.wait_event(ready)
        return ready


def _copy(features: Features, place: Place) -> None:
    place.hidden.copy_(features.hidden, non_blocking=True)
    if place.last_hidden is not None:
        if features.last_hidden is None:
            raise ValueError("distillation needs a target that is loaded with last_hidden=True")
        place.last_hidden.copy_(features.last_hidden, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that is enqueued, and whose numbers are under way to the host."""

    step: int
    epoch: int
    host: Tensor
    done: torch.cuda.Event | None


class DrafterWorker(Worker):
    """Trains one replica of the drafter."""

    def __init__(
        self,
        number: int,
        shared: Shared,
        device: torch.device,
        *,
        drafter_config: DrafterConfig,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor] | None,
        embedding: Tensor,
        head: Tensor,
        exchange: Exchange,
        statistics: Callable[[], dict[str, Any]],
    ) -> None:
        """Args: weights and moments [CPU]: the state to start from; moments None: a fresh optimizer."""
        super().__init__(f"drafter {shared.plan.first + number}", shared, device)
        self._number = number
        self._drafter_config, self._weights, self._moments = drafter_config, weights, moments
        self._embedding, self._head = embedding, head
        self._exchange = exchange
        self._statistics = statistics
        self._leads_process = number == 0
        self._saves = shared.plan.first + number == 0
        self._lag = RUN_AHEAD if device.type == "cuda" else 1
        self._pending: deque[_Pending] = deque()
        self._last_settled = 0.0
        self._stop_after = shared.plan.total_steps
        self._saved = 0  # checkpoints handed over
        self._saved_step = shared.plan.start_step  # handed over, if not yet written
        self._sums: Tensor | None = None  # of the steps since
        self._updating = False
        self.step = shared.plan.start_step
        self._drafter_step: DrafterStep

    # ------------------------------------------------------------------------------------------------- preparation

    def prepare(self) -> None:
        config = self.shared.config
        with self.shared.phase.turn(self.name, self.device, self.stream) as turn:
            step = DrafterStep.build(
                config,
                self._drafter_config,
                embedding=self._embedding,
                head=self._head,
                total_steps=self.shared.plan.total_steps,
                weights=self._weights,
            )
            if self._moments is not None:
                step.optimizer.load_state_dict(self._moments)
            step.prepare(turn)
        self._drafter_step = step
        self._weights, self._moments = {}, None
        depth = self.shared.deliveries[self._number].depth
        self.shared.places[self._number] = [Place(*step.feature_buffers()) for _ in range(depth)]
        if self.stream is not None:  # targets write there from streams of their own
            self.stream.synchronize()

    # ------------------------------------------------------------------------------------------------------ training

    def work(self) -> None:
        self._exchange.connect()
        self._last_settled = time.monotonic()
        every = self.shared.config.checkpoint.every
        try:
            while self.step < self._stop_after:
                self._one_step()
                while len(self._pending) >= self._lag:
                    self._settle()
                if self._saves and (self.step % every == 0 or self.shared.checkpoint_requested.is_set()):
                    self.shared.checkpoint_requested.clear()
                    self._save()
            while self._pending:
                self._settle()
            if self._saves and self._saved_step != self.step:
                self._save()
            if self._leads_process:
                self.shared.checkpoints.finish(self._saved)
        except BaseException:
            self._leave_emergency_state()
            raise

    def _one_step(self) -> None:
        step, accumulate = self._drafter_step, self.shared.plan.accumulate
        ring = self.shared.deliveries[self._number]
        tokens = anchors = epoch = 0
        for _ in range(accumulate):
            taken = ring.take()
            assert taken is not None, "the plan has rows for every step"
            k, delivery = taken
            if self.stream is not None and delivery.ready is not None:
                self.stream.wait_event(delivery.ready)
            prepared, place = delivery.prepared, delivery.place
            with self.meter.busy(rows=1):
                step.load(prepared.row, place.hidden, place.last_hidden)
                if self.stream is not None:
                    place.read = self.stream.record_event()
                ring.release(k)
                step.accumulate(prepared.valid_slots)
            tokens, anchors, epoch = tokens + prepared.tokens, anchors + prepared.anchors, prepared.row.epoch
        step.note(tokens=tokens, anchors=anchors, stop=self.shared.stop_requested.is_set())
        self._exchange.add_up(step.exchanged)
        with self.meter.busy():
            self._updating = True
            step.update()
            self._updating = False
        self.step += 1
        host = torch.empty_like(step.result, device="cpu", pin_memory=self.stream is not None)
        host.copy_(step.result, non_blocking=True)
        done = None
        if self.stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self.stream)
        self._pending.append(_Pending(self.step, epoch, host, done))

    def _settle(self) -> None:
        """Wait for the oldest step under way, look at its numbers, and report them."""
        pending = self._pending.popleft()
        if pending.done is not None:
            pending.done.synchronize()
        numbers = self._drafter_step.read(pending.host)
        loss = numbers.summary["loss"]
        assert isinstance(loss, float)
        supervised = bool(numbers.sums[1] != 0)  # without any weight there is no mean, and nothing wrong either
        if not (math.isfinite(numbers.grad_norm) and (math.isfinite(loss) or not supervised)):
            raise NonFiniteError(
                f"step {pending.step}: loss {loss}, gradient norm {numbers.grad_norm}; its update was not applied"
            )
        if numbers.stop:
            self._stop_after = min(self._stop_after, pending.step + self._lag - 1)
        if self._saves:
            self._sums = numbers.sums if self._sums is None else self._sums + numbers.sums
        if self._leads_process:
            self.shared.reports.put(self._make_report(pending, numbers))

    def _make_report(self, pending: _Pending, numbers: StepNumbers) -> StepReport:
        now = time.monotonic()
        seconds, self._last_settled = max(now - self._last_settled, 1e-9), now
        plan, optimizer = self.shared.plan, self.shared.config.optimizer
        summary: dict[str, Any] = dict(numbers.summary)
        return StepReport(
            step=pending.step,
            total_steps=plan.total_steps,
            epoch=pending.epoch,
            loss=summary["loss"],
            grad_norm=numbers.grad_norm,
            lr=optimizer.lr * schedule_multiplier(pending.step - 1, plan.total_steps, optimizer),
            accept_length=summary["accept_length"],
            slot_accuracy=summary["slot_accuracy"],
            sums=numbers.sums,
            tokens=numbers.tokens,
            anchors=numbers.anchors,
            step_seconds=seconds,
            tokens_per_second=numbers.tokens / seconds,
            anchors_per_second=numbers.anchors / seconds,
            workers=self._statistics(),
        )

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        """Hand the state to the checkpoint thread; waits while it still writes an older one."""
        while self._pending:  # a step that was not finite must not be saved
            self._settle()
        self.shared.checkpoints.reserve(self._saved)
        handed_over = self.shared.unsaved = self._state(), self._sums
        self.shared.checkpoints.put(self._saved, handed_over)
        self.saving.clear()
        self._sums = None
        self._saved += 1
        self._saved_step = self.step

    def _state(self) -> TrainState:
        if self.stream is not None:  # what hangs on the device hangs here, before anyone has patience
            self.stream.synchronize()
        self.saving.set()
        weights, moments = self._drafter_step.copy_state()
        return TrainState(self.step, weights, moments)

    def _leave_emergency_state(self) -> None:
        """After a failure, here or elsewhere: keep the state if it is that of a step boundary and finite."""
        if not self._saves or self._updating or self.step == self._saved_step:
            return
        try:
            state = self._state()
            if all(bool(torch.isfinite(tensor).all()) for tensor in state.drafter.values()):
                self.shared.unsaved = state, self._sums
            else:
                log.warning("no checkpoint of step %d: the weights are not finite", self.step)
        except Exception as error:  # a lost device
            log.warning("no checkpoint of step %d: %s", self.step, error)
        finally:
            self.saving.clear()

    def end(self) -> None:
        self._exchange.close()


class CheckpointWorker(Worker):
    """Writes checkpoints, one at a time, beside the training."""

    def __init__(self, shared: Shared, save: Callable[[TrainState, Tensor | None], None]) -> None:
        super().__init__("checkpoint", shared, torch.device("cpu"))
        self._save = save

    def work(self) -> None:
        while (taken := self.shared.checkpoints.take()) is not None:
            count, item = taken
            self._write(item)
            self.shared.checkpoints.release(count)

    def _write(self, item: tuple[TrainState, Tensor | None]) -> None:
        self.saving.set()
        self._save(*item)
        self.saving.clear()
        if self.shared.unsaved is item:
            self.shared.unsaved = None


class Statistics:
    """Busy time and occupancy of a run's workers, lately and since the start."""

    def __init__(self, shared: Shared, rows: Worker, targets: list[Worker], drafters: list[Worker]) -> None:
        self._shared, self._rows, self._targets, self._drafters = shared, rows, targets, drafters
        self._start = self._last = time.monotonic()
        self._before: dict[str, tuple[float, int]] = {}
        self._recent: dict[str, Any] = {}

    def recent(self) -> dict[str, Any]:
        """Over the latest window of at least `WINDOW_SECONDS`; empty before the first one is full."""
        now = time.monotonic()
        if now - self._last < WINDOW_SECONDS:
            return self._recent
        found = self._recent = self._describe(now - self._last, self._before)
        self._last = now
        self._before = {worker.name: worker.meter.read() for worker in self._all()}
        found["queues"] = {"rows": round(self._shared.rows.occupancy(), 3)} | {
            drafter.name: round(ring.occupancy(), 3)
            for drafter, ring in zip(self._drafters, self._shared.deliveries, strict=True)
        }
        return found

    def total(self) -> dict[str, Any]:
        """Since training began."""
        return self._describe(time.monotonic() - self._start, {})

    def restart(self) -> None:
        """Training begins now."""
        self._start = self._last = time.monotonic()

    def _all(self) -> list[Worker]:
        return [self._rows, *self._targets, *self._drafters]

    def _describe(self, seconds: float, before: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        per_row: dict[str, list[float]] = {"rows": [], "targets": [], "drafters": []}
        for side, workers in (("rows", [self._rows]), ("targets", self._targets), ("drafters", self._drafters)):
            for worker in workers:
                busy, rows = worker.meter.read()
                busy_before, rows_before = before.get(worker.name, (0.0, 0))
                busy, rows = busy - busy_before, rows - rows_before
                share = min(1.0, busy / seconds) if seconds > 0 else 0.0
                found[worker.name] = {
                    "device": str(worker.device),
                    "busy": round(share, 3),
                    "idle_seconds": round(max(0.0, seconds - busy), 4),
                    "rows": rows,
                    "row_seconds": round(busy / rows, 6) if rows else None,
                }
                if rows:
                    per_row[side].append(busy / rows)
        mean = {side: sum(values) / len(values) if values else 0.0 for side, values in per_row.items()}
        colocated = bool({str(w.device) for w in self._targets} & {str(w.device) for w in self._drafters} - {"cpu"})
        found["balance"] = balance(
            mean["rows"], mean["targets"], mean["drafters"], len(self._targets), len(self._drafters), colocated
        )
        return found
