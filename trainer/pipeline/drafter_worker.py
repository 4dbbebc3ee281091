"""Trains one drafter on its rows in their order; drafter 0 also reports and hands over checkpoints.

On CUDA nothing on the hot path waits for a device, but for one thing: a drafter's host may run at most `RUN_AHEAD`
steps ahead of its device, and it waits on the event of that older step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.drafter.config import DrafterConfig
from trainer.exchange.reduce import GradientExchange
from trainer.pipeline.shared import Delivery, FeatureBuffer, Shared
from trainer.pipeline.skipped import SkippedRows
from trainer.pipeline.threads import working_on
from trainer.pipeline.types import HeldOutReport, StepReport, TrainState
from trainer.pipeline.worker import Worker
from trainer.step.optim import Schedule
from trainer.step.step import DrafterStep, StepNumbers

log = logging.getLogger(__name__)


# Steps that may be under way on a CUDA device when the next one is enqueued. A stop that is noticed in step s therefore
# takes effect after step s + RUN_AHEAD - 1, in every drafter of every process alike.
RUN_AHEAD = 2


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that is enqueued, and whose numbers are under way to the host."""

    step: int
    epoch: int
    host: Tensor
    rows: list[int]
    finite: Tensor  # [rows] on the host: were the target's features of the row?
    done: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A measurement that is enqueued, and whose numbers are under way to the host."""

    step: int
    host: Tensor
    done: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Update:
    """What tells from outside whether a step's update has begun and is done on the device."""

    step: int
    begun: torch.cuda.Event
    done: torch.cuda.Event


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
        start: TrainState | None,
        schedule: Schedule,
        embedding: Tensor,
        head: Tensor,
        exchange: GradientExchange,
        statistics: Callable[[], dict[str, Any]],
        skipped: SkippedRows,
    ) -> None:
        """Args: weights [CPU]: to start from; start: with the optimizer's state, None: a fresh optimizer."""
        super().__init__(f"drafter {shared.plan.first + number}", shared, device)
        self._number = number
        self._drafter_config, self._weights = drafter_config, weights
        self._moments = start.optimizer if start is not None else None
        self._schedule, self._skipped = schedule, skipped
        self._embedding, self._head = embedding, head
        self._exchange = exchange
        self._statistics = statistics
        self._leads_process = number == 0
        self._saves = shared.plan.first + number == 0
        self._lag = RUN_AHEAD if device.type == "cuda" else 1
        self._pending: deque[_Pending] = deque()
        self._measurements: deque[_Measurement] = deque()
        self._held_out: HeldOutReport | None = None  # the newest one
        self._last_settled = 0.0
        self._stop_after = shared.plan.total_steps
        self._saved = 0  # checkpoints handed over
        self._saved_step = shared.plan.start_step  # handed over, if not yet written
        self._sums: Tensor | None = None  # of the steps since
        self._updating = False
        self._updates: deque[_Update] = deque(maxlen=RUN_AHEAD + 2)  # on CUDA
        self._tokens = start.tokens if start is not None else 0  # of the steps that are settled
        self._last_save = time.monotonic()
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
            plan = self.shared.plan
            step.optimizer.set_multipliers([self._multiplier(number) for number in range(1, plan.total_steps + 1)])
            if self._moments is not None:
                step.optimizer.load_state_dict(self._moments)
            step.prepare(turn)
        self._drafter_step = step
        self._weights, self._moments = {}, None
        depth = self.shared.deliveries[self._number].depth
        self.shared.buffers[self._number] = [
            FeatureBuffer(*step.feature_buffers(), torch.ones((), dtype=torch.bool, device=self.device))
            for _ in range(depth)
        ]
        if self.stream is not None:  # targets write there from streams of their own
            self.stream.synchronize()

    # ------------------------------------------------------------------------------------------------------ training

    def work(self) -> None:
        self._exchange.connect()
        self._last_settled = self._last_save = time.monotonic()
        try:
            while self.step < self._stop_after:
                self._one_step()
                while len(self._pending) >= self._lag:
                    self._settle()
                if self.shared.plan.measures_after(self.step) and not self._stops():
                    self._measure()
                self._settle_measurements()
                if self._saves and self._is_time_to_save():
                    self.shared.checkpoint_requested.clear()
                    self._save()
            self._settle_all()
            if self._saves and self._saved_step != self.step:
                self._save()
            if self._leads_process:
                self.shared.checkpoints.finish(self._saved)
        except BaseException:
            self._leave_emergency_state()
            raise

    def _one_step(self) -> None:
        step = self._drafter_step
        tokens = anchors = epoch = 0
        rows: list[int] = []
        finite: list[Tensor] = []
        for _ in range(self.shared.plan.gradient_accumulation_steps):
            k, delivery = self._take()
            prepared = delivery.prepared
            with self.meter.busy(rows=1):
                finite.append(self._load(k, delivery))
                step.accumulate(prepared.valid_slots)
            rows.append(prepared.row.number)
            tokens, anchors, epoch = tokens + prepared.tokens, anchors + prepared.anchors, prepared.row.epoch
        step.note(tokens=tokens, anchors=anchors, stop=self.shared.stop_requested.is_set())
        self._exchange.all_reduce(step.exchanged)
        with self.meter.busy():
            self._update()
        host, host_finite = self._to_host(step.result), self._to_host(torch.stack(finite))
        self._pending.append(_Pending(self.step, epoch, host, rows, host_finite, self._mark()))

    def _take(self) -> tuple[int, Delivery]:
        taken = self.shared.deliveries[self._number].take()
        assert taken is not None, "the plan has rows for every step and every measurement"
        if self.stream is not None and taken[1].ready is not None:
            self.stream.wait_event(taken[1].ready)
        return taken

    def _load(self, k: int, delivery: Delivery) -> Tensor:
        """Copy the row to the step's buffers and give its place back; [] bool: are the target's features finite?"""
        row, buffer = delivery.prepared.row, delivery.buffer
        finite = buffer.finite.clone()
        valid = row.anchor_valid.to(self.device, non_blocking=True) & finite
        self._drafter_step.load(replace(row, anchor_valid=valid), buffer.hidden, buffer.last_hidden)
        if self.stream is not None:
            buffer.read = self.stream.record_event()
        self.shared.deliveries[self._number].release(k)
        return finite

    def _measure(self) -> None:
        """Run this drafter's held-out rows, and add up with the others'; training is left as it was."""
        measured = self._drafter_step.measured
        for _ in range(self.shared.plan.held_out_rows_of(self._number)):
            k, delivery = self._take()
            if delivery.passed_over or self.shared.stop_requested.is_set():
                self.shared.deliveries[self._number].release(k)
                measured[-1].add_(1)
                continue
            with self.meter.busy(rows=1):
                finite = self._load(k, delivery)
                self._drafter_step.measure(delivery.prepared.valid_slots, finite)
        self._exchange.all_reduce(measured)
        host = self._to_host(measured)
        measured.zero_()
        self._measurements.append(_Measurement(self.step, host, self._mark()))

    def _update(self) -> None:
        """Apply the gradients; notes where it begins and ends, for `copy_finished_state`."""
        begun = self.stream.record_event() if self.stream is not None else None
        self._updating = True
        self._drafter_step.update()
        self.step += 1
        self._updating = False
        if self.stream is not None and begun is not None:
            self._updates.append(_Update(self.step, begun, self.stream.record_event()))

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)
        return host.copy_(tensor, non_blocking=True)

    def _mark(self) -> torch.cuda.Event | None:
        """An event that the host can wait for once all that is enqueued so far is done; None on a CPU."""
        if self.stream is None:
            return None
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self.stream)
        return done

    def _stops(self) -> bool:
        """Whether all drafters agreed to end after this step, before the last one."""
        return self.step == self._stop_after < self.shared.plan.total_steps

    def _settle_all(self) -> None:
        while self._pending:
            self._settle()
        self._settle_measurements()

    def _settle_measurements(self) -> None:
        """Report each measurement behind whose step nothing is left to settle."""
        while self._measurements and not (self._pending and self._pending[0].step <= self._measurements[0].step):
            measurement = self._measurements.popleft()
            if measurement.done is not None:
                measurement.done.synchronize()
            summary, skipped, passed_over = self._drafter_step.read_measured(measurement.host)
            now = time.monotonic()
            seconds, self._last_settled = now - self._last_settled, now  # no part of the next step's time
            if passed_over:
                continue
            loss, accept_length = summary["loss"], summary["accept_length"]
            assert isinstance(loss, float)
            assert isinstance(accept_length, float)
            rows = self.shared.plan.held_out_rows
            self._held_out = HeldOutReport(measurement.step, loss, accept_length, rows, skipped, seconds)
            if self._leads_process:
                self.shared.reports.put(self._held_out)

    def _settle(self) -> None:
        """Wait for the oldest step under way, look at its numbers, and report them."""
        pending = self._pending.popleft()
        if pending.done is not None:
            pending.done.synchronize()
        numbers = self._drafter_step.read(pending.host)
        self._tokens += numbers.tokens
        for row, finite in zip(pending.rows, pending.finite.tolist(), strict=True):
            if not finite:
                self._skipped.add(row)
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
            lr=optimizer.lr * self._multiplier(pending.step),
            accept_length=summary["accept_length"],
            slot_accuracy=summary["slot_accuracy"],
            sums=numbers.sums,
            tokens=numbers.tokens,
            anchors=numbers.anchors,
            step_seconds=seconds,
            tokens_per_second=numbers.tokens / seconds,
            anchors_per_second=numbers.anchors / seconds,
            workers=self._statistics(),
            skipped_rows=self._skipped.count,
        )

    def _multiplier(self, step: int) -> float:
        """Learning rate of a step, 1 for the first, as a share of the peak."""
        row = max(0, self.shared.plan.row_after(step - 1))  # steps before a resumed run's first one are never asked for
        return self._schedule.multiplier(row, self.shared.config.optimizer)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _is_time_to_save(self) -> bool:
        wishes = self.shared.config.checkpoint
        due = wishes.minutes is not None and time.monotonic() - self._last_save >= 60 * wishes.minutes
        return due or self.step % wishes.every == 0 or self.shared.checkpoint_requested.is_set()

    def _save(self) -> None:
        """Hand the state to the checkpoint thread; waits while it still writes an older one."""
        self._settle_all()  # a step that was not finite must not be saved
        self.shared.checkpoints.reserve(self._saved)
        handed_over = self.shared.unsaved = self._state(), self._sums
        self.shared.checkpoints.put(self._saved, handed_over)
        self.saving.clear()
        self._sums = None
        self._saved += 1
        self._saved_step = self.step
        self._last_save = time.monotonic()

    def _state(self) -> TrainState:
        if self.stream is not None:  # what hangs on the device hangs here, before anyone has patience
            self.stream.synchronize()
        self.saving.set()
        weights, moments = self._drafter_step.copy_state()
        return self._train_state(self.step, weights, moments)

    def _train_state(self, step: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> TrainState:
        pending = sum(self._drafter_step.read(each.host).tokens for each in list(self._pending) if each.step <= step)
        row = self.shared.plan.row_after(step)
        held_out = self._held_out if self._held_out is not None and self._held_out.step == step else None
        return TrainState(step, weights, moments, row, self._tokens + pending, self._schedule, held_out)

    def copy_finished_state(self) -> tuple[TrainState, Tensor | None] | None:
        """The state after the last finished step, for another thread when this worker hangs inside a step.

        None where there is nothing new, or where the worker hangs inside an update. The caller bounds the wait: a
        device that hangs may not copy either.
        """
        step = self._finished_step()
        if not self._saves or step is None or step == self._saved_step:
            return None
        with working_on(self.device) as stream:
            weights, moments = self._drafter_step.copy_state()
            if stream is not None:
                stream.synchronize()
        if self._finished_step() != step or not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            return None
        return self._train_state(step, weights, moments), self._sums

    def _finished_step(self) -> int | None:
        """The step whose weights the device holds; None while an update changes them."""
        if self.stream is None:
            return None if self._updating else self.step
        finished = self.step - len(self._updates)
        for update in list(self._updates):
            if update.done.query():  # type: ignore[no-untyped-call]
                finished = update.step
            elif update.begun.query():  # type: ignore[no-untyped-call]
                return None
        return finished

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
