"""Builds the document of `dflash status` from a snapshot and its verdict."""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_ops.document import Document, Moment, moment
from dflash_ops.errors import Exit
from dflash_ops.run.probes.gpu import GpuReading
from dflash_ops.run.probes.log import Disk, LogReading
from dflash_ops.run.probes.snapshot import Checkpoint, Compiled, Cpu, Progress, Snapshot
from dflash_ops.run.probes.unit import UnitReading
from dflash_ops.run.record import GpuRoles
from dflash_ops.run.verdict import Verdict, judge


class Asked(BaseModel):
    """What was launched."""

    model_config = ConfigDict(frozen=True)

    job: str
    launched: Moment
    launched_by: str
    release: str
    environment: str
    resumed_from: str | None


class Status(Document):
    """The answer of `dflash status`."""

    kind: Literal["status"] = "status"
    run: str
    container: str
    state: str
    reason: str
    verdict: Verdict
    asked: Asked | None
    started: Moment | None
    ended: Moment | None
    unit: UnitReading
    log: LogReading
    gpu: GpuReading
    roles: GpuRoles
    progress: Progress | None
    checkpoint: Checkpoint | None
    compiled: tuple[Compiled, ...]
    disk: Disk | None
    cpu: Cpu | None
    unreadable: tuple[str, ...]
    now: Moment = Field(description="The container's clock")
    clock_skew: float = Field(description="Seconds by which the container's clock is ahead of this machine's")

    @property
    def exit_code(self) -> Exit:
        return self.verdict.exit_code


def status_of(seen: Snapshot, container: str) -> Status:
    """A snapshot with its verdict."""
    verdict = judge(seen)
    record = seen.record
    asked = None
    if record.spec is not None:
        asked = Asked(
            job=record.spec.job,
            launched=Moment.model_validate(moment(record.spec.created)),
            launched_by=record.spec.launched_by,
            release=record.spec.release,
            environment=record.spec.environment,
            resumed_from=record.spec.resumed_from,
        )
    return Status(
        run=record.run,
        container=container,
        state=verdict.state,
        reason=verdict.reason,
        verdict=verdict,
        asked=asked,
        started=moment(record.started.time if record.started else None),
        ended=moment(getattr(verdict, "ended", None)),
        unit=seen.unit,
        log=seen.log,
        gpu=seen.gpu,
        roles=seen.roles,
        progress=seen.progress,
        checkpoint=seen.checkpoint,
        compiled=seen.compiled,
        disk=seen.disk,
        cpu=seen.cpu,
        unreadable=seen.unreadable,
        now=Moment.model_validate(moment(seen.time)),
        clock_skew=round(seen.time - time.time(), 1),
    )
