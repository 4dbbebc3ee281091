"""Makes the features of one row after the other.

In graph mode by a captured graph over compiled layers, or the run does not start: what a target may go without is
chosen in the configuration (`target.compile`, `target.capture`), never found out by the way. The layers of one kind
share one compiled function, so that compiling takes no longer for a deep target than for a flat one.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from trainer.compilation.turn import Turn
from trainer.config.sections import RunConfig
from trainer.data.rows import Row, RowShape
from trainer.target.inputs import TargetInputs
from trainer.target.model import Features, Target, decoder_layer
from trainer.target.trial import LAYER_TOLERANCE, disagreement


class FeatureMaker:
    """A target over rows of one shape. Used by one thread, under that thread's stream."""

    def __init__(self, target: Target, shape: RowShape, *, compiles: bool = True, captures: bool = True) -> None:
        """Args: compiles, captures: what graph mode shall do, by `target.compile` and `target.capture`."""
        self.target = target
        self._shape, self._compiles, self._captures = shape, compiles, captures
        self._inputs: TargetInputs | None = None
        self._captured: Features
        self._replay = self._forward

    @classmethod
    def of_run(cls, config: RunConfig, target: Target, shape: RowShape) -> FeatureMaker:
        """The one that a run of `config` uses."""
        return cls(target, shape, compiles=config.target.compile, captures=config.target.capture)

    def prepare(self, turn: Turn) -> None:
        """In graph mode, compile the layers and capture the forward pass.

        What is not had is said to the turn: `CompilePhase.require_compiled` ends the run for all that was not chosen.
        """
        if turn.mode == "eager":
            if turn.asked == "graph":
                turn.runs_eagerly("there are no CUDA graphs on a CPU", allowed_by="pipeline.targets")
        elif turn.mode == "compiled":
            turn.runs_eagerly("targets are compiled in graph mode only", allowed_by="pipeline.mode: compiled")
        elif not self._captures:
            turn.runs_eagerly("its pass is neither compiled nor captured", allowed_by="target.capture: false")
        elif self.target.uncapturable:
            turn.runs_eagerly(f"{self.target.uncapturable} (target.capture: false runs it kernel by kernel)")
        else:
            self._inputs = TargetInputs.trial(self._shape, self.target.vocab_size, self.target.device)
            if not self._compiles:
                turn.discard_compiled("its layers are not compiled", allowed_by="target.compile: false")
            elif (fault := self._compile(turn)) is not None:
                self.target.run_layers_by(None)
                turn.discard_compiled(
                    f"its layers run uncompiled: {fault} (target.compile: false captures the kernels that they launch)"
                )
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

    def _compile(self, turn: Turn) -> str | None:
        """Let compiled layers do the work; why that can't be when one does not compile or computes something else."""
        if not self.target.has_plain_layers:
            return "another library has wrapped them"
        compiled = turn.compile(decoder_layer, kinds=True)
        differences: list[float] = []

        def both_ways(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Each layer by itself: rounding that differs in one is amplified by all behind it."""
            # What layers hand to later ones they put into a dictionary: each way gets one of its own.
            own = {name: copy(value) if isinstance(value, dict) else value for name, value in kwargs.items()}
            right = decoder_layer(layer, *args, **own)
            differences.append(disagreement(_states(compiled(layer, *args, **kwargs)), _states(right)))
            return right

        try:
            self.target.run_layers_by(both_ways)
            self._forward()
            for difference in differences:
                if not difference <= LAYER_TOLERANCE:  # nor not a number
                    return f"compiled, one differs by {difference:.1%}"
            self.target.run_layers_by(compiled)
            self._forward()
        except FailOnRecompileLimitHit:
            return f"they are of more than {torch._dynamo.config.recompile_limit} kinds"
        except Exception as error:  # Dynamo, Inductor and Triton raise what they like
            # The first line of a compiler's error says whose it is, the second what happened.
            return f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
        return None


def _states(output: Any) -> Tensor:
    """[S, H] of what a decoder layer returns."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states.flatten(0, -2)
