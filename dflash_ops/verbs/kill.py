"""Ends a run: SIGTERM, so that the trainer saves; SIGKILL after the grace; then confirms that it is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document
from dflash_ops.remote.protocol import STOP_SECONDS, KillRequest
from dflash_ops.run.last_known import remember
from dflash_ops.run.probes.gpu import GpuDevices, GpuNone, GpuReading, RawGpu, read_gpu
from dflash_ops.run.probes.snapshot import Snapshot, read_snapshot
from dflash_ops.run.record import check_run_name, launched_by
from dflash_ops.run.status import Status
from dflash_ops.run.verdict import Verdict, judge
from dflash_ops.text import age, visible
from dflash_ops.transport.base import result_of
from dflash_ops.verbs.session import Session, parsed


@dataclass(frozen=True)
class KillOptions:
    """What may be asked of a kill."""

    run: str | None = None  # None: the newest
    grace: float = STOP_SECONDS  # seconds before SIGKILL
    force: bool = False


class GpuRelease(BaseModel):
    """Memory of one of the run's GPUs, in MiB; null where nvidia-smi did not say."""

    index: int
    before: float | None
    after: float | None


class _Stopped(BaseModel):
    outcome: Literal["stopped", "killed", "already-ended"]
    gpu: RawGpu | None
    snapshot: dict[str, Any]


class KillReport(Document):
    """How the run ended."""

    kind: Literal["kill"] = "kill"
    run: str
    container: str
    outcome: Literal["stopped", "killed", "already-ended"]
    verdict: Verdict
    gpus: list[GpuRelease] = Field(default_factory=list)


def question(found: Status) -> str:
    """`Stop r7 on lab (job demo, step 12/78, launched by ann@laptop 3m ago)?`"""
    parts = []
    if found.asked is not None:
        parts.append(f"job {found.asked.job}")
    if found.progress is not None:
        parts.append(f"step {found.progress.last.of_total}")
    if found.asked is not None:
        since = age(found.now.epoch - found.asked.launched.epoch)
        parts.append(f"launched by {found.asked.launched_by} {since} ago")
    about = f" ({', '.join(parts)})" if parts else ""
    return f"Stop {found.run} on {found.container}{about}?"


def kill(session: Session, options: KillOptions) -> KillReport:
    """End a run, in one round trip. A run that has ended already is left as it is. Raises DflashError."""
    request: KillRequest = {
        "root": session.root,
        "run": check_run_name(options.run) if options.run is not None else None,
        "grace": options.grace,
        "force": options.force,
        "by": launched_by(),
    }
    who = options.run or "the newest run"
    tells = f"`dflash status{f' {options.run}' if options.run else ''}` tells"
    session.so_far = f"{who} may have been asked to stop; {tells}"
    frames = session.stream("kill", request, deadline_between_frames=60)
    answer = parsed(_Stopped, result_of(frames, lambda frame: _say(session, frame.value)))
    seen = read_snapshot(answer.snapshot)
    verdict = judge(seen)
    remember(session.inventory.path, session.container_name, seen.record.run, verdict.state, verdict.reason)
    return KillReport(
        run=seen.record.run,
        container=session.container_name,
        outcome=answer.outcome,
        verdict=verdict,
        gpus=_released(answer.gpu, seen),
    )


def _say(session: Session, event: dict[str, Any]) -> None:
    if event.get("state"):
        if event["state"] == "asked to stop":
            run = visible(str(event.get("run")), 80)
            session.so_far = f"no longer waiting, but {run} was asked to stop; `dflash status {run}` tells"
        session.say(visible(f"{event.get('run')}: {event['state']}", 200))
    elif event.get("waited"):
        session.say(f"  waiting, {event['waited']} s")


def _released(before: RawGpu | None, seen: Snapshot) -> list[GpuRelease]:
    """The run's GPUs before and after. Memory of others on the same GPU is in both."""
    reading = None if before is None else read_gpu(before)
    if reading is None or isinstance(reading, GpuNone):
        return []
    held, left = _memory(reading), _memory(seen.gpu)
    return [GpuRelease(index=index, before=held.get(index), after=left.get(index)) for index in seen.roles.all]


def _memory(reading: GpuReading) -> dict[int, int | None]:
    devices = reading.devices if isinstance(reading, GpuDevices) else ()
    return {device.index: device.memory_used for device in devices}
