"""Holds what is known about a run at one moment: three readings, its records, its progress."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_ops.document import Epoch
from dflash_ops.run.probes.gpu import GpuReading, GpuUnknown, RawGpu, read_gpu, roles_of
from dflash_ops.run.probes.log import Disk, LogReading, RawLog, read_log
from dflash_ops.run.probes.unit import RawUnit, UnitReading, UnitRunning, UnitStarting, UnitStopping, read_unit
from dflash_ops.run.record import ExitRecord, GpuRoles, KillRequest, Record, RunName, RunRecord, RunSpec, Started
from dflash_ops.text import visible
from dflash_ops.transport.base import BadAnswer

# Loading a model and compiling for it are silent for minutes; a step is not.
QUIET_BEFORE_FIRST_STEP = 600.0
QUIET_FLOOR = 120.0


class Step(BaseModel):
    """A step line of metrics.jsonl; None is what the trainer did not write."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int = Field(ge=0, lt=1 << 63)
    total_steps: int | None = Field(None, lt=1 << 63)
    epoch: int | None = None
    time: float | None = None
    loss: float | None = None
    accept_length: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_second: float | None = None
    anchors_per_second: float | None = None
    step_seconds: float | None = None
    workers: dict[str, Any] = Field(default_factory=dict)

    @property
    def of_total(self) -> str:
        """`12/200`, or `12` when the trainer does not say of how many."""
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)


class HeldOut(BaseModel):
    """A held-out line of metrics.jsonl: how the drafter did on conversations that it is not trained on."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int = Field(ge=0, lt=1 << 63)
    loss: float | None = None
    accept_length: float | None = None
    rows: int | None = None


class Progress(BaseModel):
    """The training so far."""

    model_config = ConfigDict(frozen=True)

    last: Step
    age: float = Field(description="Seconds since metrics.jsonl grew, by the container's clock")
    history: tuple[Step, ...] = ()
    held_out: HeldOut | None = Field(None, description="The newest measurement, which may be of an earlier step")

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at the pace of the history."""
        timed = [step for step in self.history if step.time is not None]
        if len(timed) < 2 or self.last.total_steps is None:
            return None
        steps = timed[-1].step - timed[0].step
        seconds = (timed[-1].time or 0.0) - (timed[0].time or 0.0)
        return (self.last.total_steps - self.last.step) * seconds / steps if steps > 0 and seconds > 0 else None


class Cpu(BaseModel):
    """CPU seconds that the trainer used over an interval of seconds."""

    model_config = ConfigDict(frozen=True)

    used: float
    over: float

    @property
    def cores(self) -> float:
        return self.used / self.over if self.over > 0 else 0.0


class Compiled(BaseModel):
    """What a worker of the trainer runs as."""

    model_config = ConfigDict(frozen=True)

    worker: str
    mode: str
    note: str = Field(description="What it goes without, and why; empty on the full path")
    allowed_by: str = Field(description="The field of the configuration that chose so; empty when none did")

    @property
    def fallback(self) -> str:
        """The note for people, with the field that allows it."""
        return f"{self.worker}: {self.note}" + (f"; allowed by {self.allowed_by}" if self.allowed_by else "")


class Checkpoint(BaseModel):
    """A checkpoint with a manifest."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=r"^step-[0-9]{1,12}$")
    step: int
    time: Epoch


class Snapshot(BaseModel):
    """Everything that a verdict is made of."""

    model_config = ConfigDict(frozen=True)

    record: RunRecord
    unreadable: tuple[str, ...] = Field((), description="Records that exist and cannot be read")
    time: float = Field(description="Unix seconds by the container's clock")
    boot_id: str
    age: float = Field(description="Seconds since the run was asked for")
    unit: UnitReading
    log: LogReading
    gpu: GpuReading
    roles: GpuRoles = Field(default_factory=GpuRoles)
    progress: Progress | None = None
    quiet_after: float = QUIET_FLOOR
    disk: Disk | None = None
    cpu: Cpu | None = None
    checkpoint: Checkpoint | None = Field(None, description="The newest one")
    compiled: tuple[Compiled, ...] = Field((), description="The trainer's workers, once all are compiled")


class _Metrics(BaseModel):
    mtime: float | None
    steps: list[Any]
    last: Any
    held_out: Any = None


class _Raw(BaseModel):
    run: RunName
    time: Epoch
    monotonic: float
    boot_id: str
    age: float
    unit: RawUnit
    records: dict[str, Any]
    log: RawLog
    disk: Disk | None
    metrics: _Metrics
    compiled: list[dict[str, Any]] | None = None
    checkpoints: list[Checkpoint]
    gpu: RawGpu | None
    cpu: Cpu | None


def read_snapshot(value: dict[str, Any]) -> Snapshot:
    """The answer of `dflash_ops.remote.status` as typed readings. Raises BadAnswer when it is no such answer."""
    try:
        raw = _Raw.model_validate(value)
    except ValidationError as error:
        raise BadAnswer(
            "the container's probe answered in a form that this dflash does not know", detail=str(error)
        ) from error
    unit = read_unit(raw.unit, raw.monotonic)
    record, unreadable = _record(raw.run, raw.records)
    progress = _progress(raw.metrics, raw.time)
    quiet_after = quiet_after_of(progress)
    lifetime = unit.seconds if isinstance(unit, UnitStarting | UnitRunning | UnitStopping) else None
    return Snapshot(
        record=record,
        unreadable=unreadable,
        time=raw.time,
        boot_id=raw.boot_id,
        age=raw.age,
        unit=unit,
        log=read_log(raw.log, raw.time, quiet_after, lifetime),
        gpu=GpuUnknown(reason="not asked") if raw.gpu is None else read_gpu(raw.gpu),
        roles=_roles(record.spec),
        progress=progress,
        quiet_after=quiet_after,
        disk=raw.disk,
        cpu=raw.cpu,
        checkpoint=raw.checkpoints[-1] if raw.checkpoints else None,
        compiled=tuple(
            Compiled(**{name: visible(str(worker.get(name) or ""), 300) for name in Compiled.model_fields})
            for worker in raw.compiled or ()
        ),
    )


def _roles(spec: RunSpec | None) -> GpuRoles:
    """The GPUs that the launch worked out; of a configuration only what it names."""
    if spec is None or (not spec.gpus.all and "pipeline" not in spec.config):
        return GpuRoles()
    return roles_of(spec.gpus, spec.config)


def _record(run: str, values: dict[str, Any]) -> tuple[RunRecord, tuple[str, ...]]:
    """Each record on its own: a damaged one must not hide the others."""
    models: dict[str, type[Record]] = {
        "spec": RunSpec,
        "started": Started,
        "exit": ExitRecord,
        "kill_requested": KillRequest,
    }
    listed = values.get("unreadable")
    unreadable = [visible(str(name), 100) for name in listed] if isinstance(listed, list) else []
    found: dict[str, Any] = {}
    for name, model in models.items():
        if values.get(name) is None:
            continue
        try:
            found[name] = model.model_validate(values[name])
        except ValidationError:
            unreadable.append(f"{name.replace('_', '-')}.json")
    return RunRecord(run=run, **found), tuple(unreadable)


def _step(value: Any) -> Step | None:
    try:
        return Step.model_validate(value)
    except ValidationError:
        return None


def _progress(metrics: _Metrics, now: float) -> Progress | None:
    last = _step(metrics.last)
    if last is None or metrics.mtime is None:
        return None
    history = tuple(step for step in map(_step, metrics.steps) if step is not None)
    held_out = None
    with contextlib.suppress(ValidationError):
        held_out = HeldOut.model_validate(metrics.held_out)
    return Progress(last=last, age=max(0.0, now - metrics.mtime), history=history, held_out=held_out)


def quiet_after_of(progress: Progress | None) -> float:
    """Seconds of silence that are normal: several times the longest gap between the latest metric lines."""
    if progress is None:
        return QUIET_BEFORE_FIRST_STEP
    times = [step.time for step in progress.history if step.time is not None][-20:]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return max([QUIET_FLOOR, *(5 * gap for gap in gaps), 5 * (progress.last.step_seconds or 0.0)])
