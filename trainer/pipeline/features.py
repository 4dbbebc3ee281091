"""How does a target make one row's features after the other? By a captured graph where it can, eagerly elsewhere."""

from __future__ import annotations

from trainer.compilation import Turn
from trainer.data.rows import Row, RowShape
from trainer.target import Features, Target, TargetInputs


class FeatureMaker:
    """A target over rows of one shape. Used by one thread, under that thread's stream."""

    def __init__(self, target: Target, shape: RowShape) -> None:
        self.target = target
        self._shape = shape
        self._inputs: TargetInputs | None = None
        self._captured: Features
        self._replay = self._forward

    def prepare(self, turn: Turn) -> None:
        """Capture the forward pass in graph mode, if the target's attention allows it. Targets are never compiled."""
        if turn.mode != "graph" or not self.target.capturable:
            turn.runs_eagerly("a target is not compiled" if turn.mode != "graph" else "its attention is not capturable")
            return
        self._inputs = TargetInputs.blank(self._shape, self.target.device)
        for _ in range(2):
            self._forward()
        self._replay = turn.capture("forward", self._forward)

    def make(self, row: Row) -> Features:
        """The row's features; a captured target overwrites them with the next row's."""
        if self._inputs is None:
            return self.target.features(row)
        self._inputs.copy_(TargetInputs.of(row, self._shape))
        self._replay()
        return self._captured

    def _forward(self) -> None:
        assert self._inputs is not None
        self._captured = self.target.forward(self._inputs)
