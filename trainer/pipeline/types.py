"""Defines what the pipeline and its caller say to each other.

`trainer.run` builds a `Pipeline` (see `supervisor.py`) and hands it `Hooks`; everything that crosses that border
is defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.step.optim import Schedule


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """What the drafter did on the held-out rows after a step, pooled over every drafter of every process."""

    step: int
    loss: float  # as a step's
    accept_length: float
    rows: int
    skipped_rows: int  # of these, for features that were not finite
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainState:
    """All that training needs to go on from a step boundary; every tensor is on the CPU and owned by this object."""

    step: int  # optimizer steps that are finished
    drafter: Mapping[str, Tensor]  # state_dict of the drafter, fp32 masters
    optimizer: Mapping[str, Any]  # state_dict of trainer.optim's optimizer
    row: int = 0  # the row that comes next
    tokens: int = 0  # trained so far, padding left out
    schedule: Schedule | None = None  # None: one that ends with the run
    held_out: HeldOutReport | None = None  # measured with just these weights; no part of what training needs


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished optimizer step, pooled over every drafter of every process."""

    step: int  # 1 for the first one
    total_steps: int
    epoch: int
    loss: float  # weighted mean over all valid slots
    grad_norm: float  # before clipping
    lr: float
    accept_length: float  # expected accepted length, from accepted prefixes
    slot_accuracy: list[float | None]  # [B-1]
    sums: Tensor  # `objective.slot_sums` of the step, on the CPU: telemetry pools them over its window
    tokens: int  # tokens of the step's rows, padding left out
    anchors: int  # valid anchors of the step's rows
    step_seconds: float  # since the step before ended
    tokens_per_second: float
    anchors_per_second: float
    # per worker of this process: {"target 0": {"busy": 0.93, "rows": 12, ...}, "queues": {...}, "balance": {...}}
    workers: dict[str, Any] = field(default_factory=dict)
    skipped_rows: int = 0  # of this process since it started, see `SkippedRows`


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller wants to know and to decide. All are called in the thread that called `run`, but `save`.

    `should_stop` and `should_checkpoint` are asked several times a second once the targets are loaded. A stop is agreed
    on by all drafters of all processes: each finishes the same step, a checkpoint is saved, and `run` returns. One
    process alone does not wait for its first step: a stop while it compiles ends it at once. `should_checkpoint` asks
    for one extra checkpoint (the periodic ones follow `checkpoint.every`) and must return True once per request.
    `save` gets the state and the `objective.slot_sums` of the steps since the checkpoint before, None where there were
    none. It is called in the thread "checkpoint", in the process that holds drafter 0 only, and never twice at once;
    what it raises ends the run.
    """

    on_status: Callable[[str], None] = lambda text: None  # "compiling drafter 1/3"
    on_compiled: Callable[[list[dict[str, Any]]], None] = lambda reports: None  # one JSON-able report a worker
    on_step: Callable[[StepReport], None] = lambda report: None
    on_held_out: Callable[[HeldOutReport], None] = lambda report: None
    on_failure: Callable[[], None] = lambda: None  # no more steps come; a last checkpoint may still take minutes
    should_stop: Callable[[], bool] = lambda: False
    should_checkpoint: Callable[[], bool] = lambda: False
    save: Callable[[TrainState, Tensor | None], None] = lambda state, sums: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run that did not fail ended."""

    step: int
    total_steps: int
    stopped: bool  # True: `should_stop` asked for it; False: all steps are done
    workers: dict[str, Any]  # busy and idle time per worker, bottleneck, a better split
    stuck: list[str] = field(default_factory=list)  # as in `PipelineError`: threads that still compile after a stop


class PipelineConfigError(ValueError):
    """The run cannot be done as configured; said before anything starts."""


class StopOverdueError(RuntimeError):
    """A stop was asked for and the step did not end in time: a worker hangs."""


class PipelineError(RuntimeError):
    """A worker failed and the run with it.

    `worker` names the one that failed first and `__cause__` is its exception. `stuck` names threads that did not end in
    time: the process must then be left by `os._exit`, since a thread that hangs in a driver cannot be joined.
    """

    def __init__(self, worker: str, cause: BaseException, *, later: list[tuple[str, BaseException]], stuck: list[str]):
        super().__init__(f"{worker} failed: {type(cause).__name__}: {cause}")
        self.worker = worker
        self.later = later
        self.stuck = stuck
        self.__cause__ = cause
