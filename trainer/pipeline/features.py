"""How does a target make one row's features after the other? By a captured graph where it can, eagerly elsewhere."""

from __future__ import annotations

import torch

from trainer.compilation import Turn
from trainer.data.rows import Row
from trainer.target import Features, Target, TargetInputs


class FeatureMaker:
    """A target over rows of one shape. Used by one thread, under that thread's stream."""

    def __init__(self, target: Target, sequence_length: int, anchors: int) -> None:
        self.target = target
        self._length, self._anchors = sequence_length, anchors
        self._inputs: TargetInputs | None = None
        self._captured: Features
        self._replay = self._forward

    def prepare(self, turn: Turn) -> None:
        """Capture the forward pass in graph mode, if the target's attention allows it. Targets are never compiled."""
        if turn.mode != "graph" or not self.target.capturable:
            turn.runs_eagerly("a target is not compiled" if turn.mode != "graph" else "its attention is not capturable")
            return
        device, length = self.target.device, self._length
        self._inputs = TargetInputs(
            torch.zeros(1, length, dtype=torch.int64, device=device),
            torch.arange(length, device=device)[None],
            torch.full((self._anchors + 2,), length, dtype=torch.int32, device=device),
        )
        self._inputs.boundaries[0].zero_()
        for _ in range(2):
            self._forward()
        self._replay = turn.capture("forward", self._forward)

    def make(self, row: Row) -> Features:
        """The row's features; a captured target overwrites them with the next row's."""
        if self._inputs is None:
            return self.target.features(row)
        for buffer, tensor in zip(self._inputs, self.target.inputs(row), strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self._replay()
        return self._captured

    def _forward(self) -> None:
        assert self._inputs is not None
        self._captured = self.target.forward(self._inputs)
