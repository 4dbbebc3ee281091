"""Runs the target over the next row and copies the features to the drafter that the row belongs to."""

from __future__ import annotations

import torch

from trainer.data.rows import RowShape
from trainer.pipeline.shared import Delivery, FeatureBuffer, Shared
from trainer.pipeline.worker import Worker
from trainer.target.features import FeatureMaker
from trainer.target.model import Features, Target


class TargetWorker(Worker):
    """Runs the target; whichever target is free takes the next row."""

    def __init__(self, number: int, shared: Shared, target: Target, shape: RowShape) -> None:
        super().__init__(f"target {number}", shared, target.device)
        self._maker = FeatureMaker.of_run(shared.config, target, shape)
        self._copies: torch.cuda.Stream | None = None

    def prepare(self) -> None:
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with self.shared.phase.turn(self.name, self.device, self.stream) as turn:
            self._maker.prepare(turn)

    def work(self) -> None:
        shared = self.shared
        while (taken := shared.rows.take()) is not None:
            count, prepared = taken
            shared.rows.release(count)
            drafter, k = shared.plan.place(prepared.row.number)
            ring = shared.deliveries[drafter]
            buffer = shared.buffers[drafter][ring.reserve(k)]
            with self.meter.busy(rows=1):
                features = self._maker.make(prepared.row)
                ready = self._deliver(features, buffer)
            ring.put(k, Delivery(prepared, buffer, ready))

    @torch.no_grad()
    def _deliver(self, features: Features, buffer: FeatureBuffer) -> torch.cuda.Event | None:
        """Copy features into a drafter's feature buffer; on CUDA on a side stream, after those who have to be first."""
        if self._copies is None or self.stream is None:
            _copy(features, buffer)
            return None
        self._copies.wait_stream(self.stream)
        if buffer.read is not None:
            self._copies.wait_event(buffer.read)
        with torch.cuda.stream(self._copies):
            _copy(features, buffer)
            ready: torch.cuda.Event = self._copies.record_event()
        # The features' memory is this worker's again once they are copied.
        self.stream.wait_event(ready)
        return ready


def _copy(features: Features, buffer: FeatureBuffer) -> None:
    buffer.hidden.copy_(features.hidden, non_blocking=True)
    if buffer.last_hidden is not None:
        if features.last_hidden is None:
            raise ValueError("distillation needs a target that is loaded with last_hidden=True")
        buffer.last_hidden.copy_(features.last_hidden, non_blocking=True)
