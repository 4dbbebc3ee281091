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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.drafter.config import DrafterConfig
from trainer.exchange.reduce import GradientExchange
from trainer.pipeline.shared import FeatureBuffer, Shared
from trainer.pipeline.types import StepReport, TrainState
from trainer.pipeline.worker import Worker
from trainer.step.optim import schedule_multiplier
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
        exchange: GradientExchange,
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
        self.shared.buffers[self._number] = [FeatureBuffer(*step.feature_buffers()) for _ in range(depth)]
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
        step = self._drafter_step
        ring = self.shared.deliveries[self._number]
        tokens = anchors = epoch = 0
        for _ in range(self.shared.plan.gradient_accumulation_steps):
            taken = ring.take()
            assert taken is not None, "the plan has rows for every step"
            k, delivery = taken
            if self.stream is not None and delivery.ready is not None:
                self.stream.wait_event(delivery.ready)
            prepared, buffer = delivery.prepared, delivery.buffer
            with self.meter.busy(rows=1):
                step.load(prepared.row, buffer.hidden, buffer.last_hidden)
                if self.stream is not None:
                    buffer.read = self.stream.record_event()
                ring.release(k)
                step.accumulate(prepared.valid_slots)
            tokens, anchors, epoch = tokens + prepared.tokens, anchors + prepared.anchors, prepared.row.epoch
        step.note(tokens=tokens, anchors=anchors, stop=self.shared.stop_requested.is_set())
        self._exchange.all_reduce(step.exchanged)
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
