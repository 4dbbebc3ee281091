"""How does a target make one row's features after the other?

In graph mode, where its attention allows it, by a captured graph over compiled layers; elsewhere eagerly. The layers of
one kind share one compiled function, so that compiling takes no longer for a deep target than for a flat one. A target
whose layers don't compile, or then compute something else, keeps its own kernels: the graph launches them as fast, but
they move more memory.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from trainer.compilation import Turn
from trainer.data.rows import Row, RowShape
from trainer.target import LAYER_TOLERANCE, Features, Target, TargetInputs, decoder_layer, disagreement

log = logging.getLogger(__name__)


class FeatureMaker:
    """A target over rows of one shape. Used by one thread, under that thread's stream."""

    def __init__(self, target: Target, shape: RowShape, *, compiles: bool = True) -> None:
        """With `compiles`, graph mode compiles the target's layers."""
        self.target = target
        self._shape, self._compiles = shape, compiles
        self._inputs: TargetInputs | None = None
        self._captured: Features
        self._replay = self._forward

    def prepare(self, turn: Turn) -> None:
        """Compile the layers and capture the forward pass, in graph mode, if the target's attention allows it."""
        if turn.mode != "graph" or not self.target.capturable:
            reason = "its attention is not capturable" if turn.mode == "graph" else "targets compile in graph mode only"
            turn.runs_eagerly(reason)
            return
        self._inputs = TargetInputs.trial(self._shape, self.target.vocab_size, self.target.device)
        if self._compiles:
            self._compile(turn)
        else:
            turn.discard_compiled("target.compile is false")
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

    def _compile(self, turn: Turn) -> None:
        """Let compiled layers do the work, unless one of them does not compile or computes something else."""
        if not self.target.has_plain_layers:
            turn.discard_compiled("its layers run uncompiled: another library has wrapped them")
            return
        compiled = turn.compile(decoder_layer, kinds=True)
        differences: list[float] = []

        def both_ways(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Each layer by itself: rounding that differs in one is amplified by all behind it."""
            right = decoder_layer(layer, *args, **kwargs)
            differences.append(disagreement(_states(compiled(layer, *args, **kwargs)), _states(right)))
            return right

        self.target.run_layers_by(both_ways)
        try:
            self._forward()
            faults = [f"compiled, one differs by {d:.1%}" for d in differences if not d <= LAYER_TOLERANCE]
            fault = faults[0] if faults else None
        except Exception as error:  # Dynamo, Inductor and Triton raise what they like
            # The first line of a compiler's error says whose it is, the second what happened.
            fault = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
        if fault is None:
            self.target.run_layers_by(compiled)
        else:
            log.warning("the target's layers run uncompiled: %s", fault)
            self.target.run_layers_by(None)
            turn.discard_compiled(f"its layers run uncompiled: {fault}")


def _states(output: Any) -> Tensor:
    """[S, H] of what a decoder layer returns."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states.flatten(0, -2)
