"""Runs the target over the next row and copies the features to the drafter that the row belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

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
            count, (planned, prepared) = taken
            shared.rows.release(count)
            ring = shared.deliveries[planned.drafter]
            buffer = shared.buffers[planned.drafter][ring.reserve(planned.k)]
            if planned.held_out and shared.stop_requested.is_set():  # a stop does not wait for a measurement
                ring.put(planned.k, Delivery(prepared, buffer, None, passed_over=True))
                continue
            with self.meter.busy(rows=1):
                features = self._maker.make(prepared.row)
                ready = self._deliver(features, buffer)
            ring.put(planned.k, Delivery(prepared, buffer, ready))

    @torch.no_grad()
    def _deliver(self, features: Features, buffer: FeatureBuffer) -> torch.cuda.Event | None:
        """Copy features into a drafter's feature buffer; on CUDA on a side stream, after those who have to be first."""
        finite = _blank_unless_finite(features)
        if self._copies is None or self.stream is None:
            _copy(features, finite, buffer)
            return None
        self._copies.wait_stream(self.stream)
        if buffer.read is not None:
            self._copies.wait_event(buffer.read)
        with torch.cuda.stream(self._copies):
            _copy(features, finite, buffer)
            ready: torch.cuda.Event = self._copies.record_event()
        # The features' memory is this worker's again once they are copied.
        self.stream.wait_event(ready)
        return ready


def _blank_unless_finite(features: Features) -> Tensor:
    """Whether all features are finite, [] bool on their device; if not, they are overwritten with zeros.

    The host does not learn it here, which would be a wait for the device. A sum is as good as a look at each: no sum
    of finite features comes near float32's end.
    """
    tensors = [tensor for tensor in (features.hidden, features.last_hidden) if tensor is not None]
    finite = torch.isfinite(torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])).all()
    for tensor in tensors:
        tensor.masked_fill_(~finite, 0.0)
    return finite


def _copy(features: Features, finite: Tensor, buffer: FeatureBuffer) -> None:
    buffer.finite.copy_(finite, non_blocking=True)
    buffer.hidden.copy_(features.hidden, non_blocking=True)
    if buffer.last_hidden is not None:
        if features.last_hidden is None:
            raise ValueError("distillation needs a target that is loaded with last_hidden=True")
        buffer.last_hidden.copy_(features.last_hidden, non_blocking=True)
