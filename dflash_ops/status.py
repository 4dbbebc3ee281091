"""How is a run? Three probes in one round trip, a verdict, and what led to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_ops.document import Document, Moment, moment
from dflash_ops.errors import Exit
from dflash_ops.live import lasting
from dflash_ops.probes.gpu import GpuReading
from dflash_ops.probes.log import Disk, LogReading
from dflash_ops.probes.snapshot import Checkpoint, Cpu, Progress, Snapshot, read_snapshot
from dflash_ops.probes.unit import UnitReading
from dflash_ops.run import GpuRoles, check_run_name
from dflash_ops.seen import last_seen, remember
from dflash_ops.session import Session
from dflash_ops.text import age
from dflash_ops.transport.base import TransportError
from dflash_ops.verdict import Verdict, judge

LOG_LINES = 200  # enough to find the first cause of a failure above its consequences


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
    target: str
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
    disk: Disk | None
    cpu: Cpu | None
    unreadable: tuple[str, ...]
    now: Moment = Field(description="The container's clock")
    clock_skew: float = Field(description="Seconds by which the container's clock is ahead of this machine's")

    @property
    def exit_code(self) -> Exit:
        return self.verdict.exit_code


def status(session: Session, run: str | None) -> Status:
    """Probe a run (the newest when `run` is None).

    Raises RemoteRefusal when there is no such run, and TransportError, which says what was last known, when the
    container cannot be asked.
    """
    if run is not None:
        check_run_name(run)
    try:
        reply = session.call("probe", {"run": run, "lines": LOG_LINES}, deadline=30)
    except TransportError as error:
        seen = last_seen(session.target_name, run)
        if seen is not None:
            past = f"{seen.run} was {seen.state} when last seen, {age(time.time() - seen.time)} ago"
            error.hint = f"{error.hint}; {past}" if error.hint else past
        raise
    return describe(session, reply.value)


def watch(session: Session, run: str | None, every: float = 2.0) -> Iterator[Status]:
    """A status every few seconds over one connection, until the run is over; reconnects by itself."""
    if run is not None:
        check_run_name(run)
    chosen = run

    def request() -> dict[str, Any]:
        return {"run": chosen, "lines": LOG_LINES, "every": every}

    for frame in lasting(session, "probe", request):
        current = describe(session, frame.value)
        chosen = current.run  # "newest" is decided once
        yield current


def describe(session: Session, value: dict[str, Any]) -> Status:
    """The remote probe's answer, judged."""
    seen = read_snapshot(value)
    result = status_of(seen, session.target_name)
    remember(session.target_name, result.run, result.state, result.reason)
    return result


def status_of(seen: Snapshot, target: str) -> Status:
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
        target=target,
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
        disk=seen.disk,
        cpu=seen.cpu,
        unreadable=seen.unreadable,
        now=Moment.model_validate(moment(seen.time)),
        clock_skew=round(seen.time - time.time(), 1),
    )
