"""Judges a run: one total function from what is known to a verdict and its reason.

The order of the questions matters: records of an end come before the probes, what systemd says of a unit that is
there comes before what is inferred from one that is not, and a probe that could not answer never makes a run dead.
`Result` alone is never believed: systemd answers `success` for a unit that it has never heard of, and for a process
that SIGTERM ended.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_ops.errors import Exit
from dflash_ops.remote.protocol import STOP_SECONDS
from dflash_ops.run.probes.gpu import Device, GpuDevices, GpuNone, GpuUnknown, work_by_role
from dflash_ops.run.probes.log import LogFresh, LogGone, LogSilent, LogUnknown, last_error, named_failure
from dflash_ops.run.probes.snapshot import Snapshot
from dflash_ops.run.probes.unit import (
    Ending,
    UnitAbsent,
    UnitEnded,
    UnitRunning,
    UnitStarting,
    UnitStopping,
    UnitUnknown,
)
from dflash_ops.run.record import KillRequest
from dflash_ops.text import age, visible

# A launch makes the directory and then the unit; between the two there is neither.
_LAUNCH_TAKES = 120.0
# A stop that systemd took has ended the unit by then: its answer may take 20 s, the unit's end STOP_SECONDS.
_STOP_TAKES = 120.0
# CPU use below this is a process that waits: a blocked trainer still wakes up to look at its queues.
_IDLE_CORES = 0.05
# systemd's own exit codes for what failed before the program ran, and the entry script's.
_SETUP = {
    "120": "the entry script could not enter the release",
    "200": "the working directory could not be entered (200/CHDIR)",
    "203": "the entry script could not be executed (203/EXEC)",
    "209": "the log could not be opened (209/STDOUT)",
    "217": "the user does not exist (217/USER)",
    "226": "mount namespaces are not allowed here (226/NAMESPACE); set `features: nesting=1`",
    "243": "credentials could not be set up (243/CREDENTIALS); set `features: nesting=1`",
}


class _Verdict(BaseModel):
    model_config = ConfigDict(frozen=True)

    reason: str = Field(description="One line; empty when the state says it all")

    exit_code: ClassVar[Exit] = Exit.RUN_NOT_FINISHED  # of `status --exit-code` and `wait`
    finished: ClassVar[bool] = False


class Starting(_Verdict):
    """The unit is being started, or its process has not written anything yet."""

    state: Literal["starting"] = "starting"


class Running(_Verdict):
    """Alive and writing."""

    state: Literal["running"] = "running"


class BusyQuiet(_Verdict):
    """Alive and silent, but at work: compiling, evaluating, saving."""

    state: Literal["busy-quiet"] = "busy-quiet"


class Stalled(_Verdict):
    """Alive, silent, and not at work."""

    state: Literal["stalled"] = "stalled"


class Stopping(_Verdict):
    """On its way out."""

    state: Literal["stopping"] = "stopping"


class _Finished(_Verdict):
    ended: float | None = Field(None, description="Unix seconds by the container's clock; None where no record says")
    finished: ClassVar[bool] = True


class Succeeded(_Finished):
    """It did all its steps and exited with status 0."""

    state: Literal["succeeded"] = "succeeded"
    exit_code: ClassVar[Exit] = Exit.OK


class Failed(_Finished):
    """It ended by itself and badly."""

    state: Literal["failed"] = "failed"
    ending: Ending
    failure: str | None = Field(None, description="The named failure that the log shows")
    exit_code: ClassVar[Exit] = Exit.RUN_FAILED


class Cancelled(_Finished):
    """Somebody ended it with `dflash kill`."""

    state: Literal["cancelled"] = "cancelled"
    ending: Ending | None
    exit_code: ClassVar[Exit] = Exit.RUN_CANCELLED


class Lost(_Finished):
    """It is gone, and not by its own doing nor by dflash: its container restarted, or somebody else stopped it."""

    state: Literal["lost"] = "lost"
    exit_code: ClassVar[Exit] = Exit.RUN_LOST


class Unknown(_Verdict):
    """A probe that was needed could not answer; the run may be in any state."""

    state: Literal["unknown"] = "unknown"
    exit_code: ClassVar[Exit] = Exit.TEMPORARY


Verdict = Annotated[
    Starting | Running | BusyQuiet | Stalled | Stopping | Succeeded | Failed | Cancelled | Lost | Unknown,
    Field(discriminator="state"),
]


def judge(seen: Snapshot) -> Verdict:
    """The verdict. Total and pure: every snapshot has one, and the same one each time."""
    record = seen.record
    if record.exit is not None:
        ending = Ending.of_record(record.exit)
        return _ended(seen, ending, record.exit.time)
    unit = seen.unit
    match unit:
        case UnitUnknown(reason=reason):
            return Unknown(reason=reason)
        case UnitAbsent():
            return _absent(seen)
        case UnitEnded() if _foreign(seen, unit.invocation_id):
            return Lost(reason="its unit was started again by something else than dflash")
        case UnitEnded(ending=ending):
            return _ended(seen, ending, None)
        case UnitStarting() | UnitRunning() | UnitStopping() if _foreign(seen, unit.invocation_id):
            return Unknown(reason="its unit was started again by something else than dflash (other InvocationID)")
        case UnitStarting():
            return Starting(reason="systemd is starting the unit")
        case UnitStopping():
            return Stopping(reason=_stop_reason(seen))
        case UnitRunning():
            return _alive(seen, unit)


def _foreign(seen: Snapshot, invocation_id: str) -> bool:
    """Whether the unit is another incarnation than the one that was launched."""
    started = seen.record.started
    return started is not None and bool(invocation_id) and started.invocation_id != invocation_id


def _stop_reason(seen: Snapshot) -> str:
    asked = seen.record.kill_requested
    if asked is None or not (asked.sent or seen.time - asked.time <= _STOP_TAKES):
        return "something else than dflash asked it to stop"
    return f"asked to stop {age(seen.time - asked.time)} ago by {visible(asked.by, 80)}"


def _absent(seen: Snapshot) -> Verdict:
    """No unit and no exit record that could be read."""
    started = seen.record.started
    if "exit.json" in seen.unreadable:
        return Unknown(reason="it ended, but its exit.json is damaged")
    if started is None:
        spec = seen.record.spec
        if spec is not None and spec.boot_id not in (None, seen.boot_id):
            return Lost(reason="the container restarted while it was launched")
        if "started.json" not in seen.unreadable and seen.age < _LAUNCH_TAKES:
            return Starting(reason="its launch is under way")
        return Lost(reason="its launch was cut off before the unit started")
    asked = seen.record.kill_requested
    if asked is not None and asked.sent and started.boot_id == seen.boot_id:
        return Cancelled(reason="stopped on request; it left no exit record", ending=None)
    if started.boot_id != seen.boot_id:
        return Lost(reason="the container restarted while it ran" + _where_it_was(seen))
    return Lost(reason="systemd no longer knows the unit, and it left no exit record" + _where_it_was(seen))


def _where_it_was(seen: Snapshot) -> str:
    """How far it came and what it left to go on from."""
    parts = []
    if seen.progress is not None:
        last = seen.progress.last
        parts.append(f"at step {last.of_total}")
    if seen.checkpoint is not None:
        parts.append(f"newest checkpoint {seen.checkpoint.name}")
    return f" ({', '.join(parts)})" if parts else ""


def _lines(seen: Snapshot) -> tuple[str, ...]:
    return seen.log.lines if isinstance(seen.log, LogFresh | LogSilent) else ()


def _ended(seen: Snapshot, ending: Ending, when: float | None) -> Verdict:
    """The main process is gone and this is how."""
    asked = _stopped_by(seen, ending, when)
    if asked is not None:
        by = visible(asked.by, 80)
        how = "" if ending.clean else f"; {ending.describe()}"
        return Cancelled(reason=f"stopped by {by}{how}", ended=when, ending=ending)
    if ending.clean:
        if seen.record.exit is not None and seen.record.exit.stop_requested:
            reason = "the unit was stopped by something else than dflash, or its container was shut down"
            return Lost(reason=reason + _where_it_was(seen), ended=when)
        return Succeeded(reason=_lasted(seen, when), ended=when)
    terminated = ending.code == "killed" and ending.status in ("TERM", "HUP", "INT")
    if (
        terminated
        or ending.result == "timeout"
        or (ending.code == "exited" and ending.status == "143")
        or ending.result == "success"
    ):
        reason = f"{ending.describe()}: something else than dflash stopped it"
        return Lost(reason=reason + _where_it_was(seen), ended=when)
    failure = named_failure(_lines(seen))
    why = _why(seen, ending, failure.name if failure else None)
    lasted = _lasted(seen, when)
    reason = f"{ending.describe()}{' ' + lasted if lasted else ''} ({why})" if why else ending.describe()
    return Failed(reason=reason, ended=when, ending=ending, failure=failure.name if failure else None)


def _stopped_by(seen: Snapshot, ending: Ending, when: float | None) -> KillRequest | None:
    """The kill request that ended the run; None when it ended without one.

    A request that is not marked as sent never came to systemd, or its sender died in the moment between. Then the end
    must come soon and look like a stop: by a signal, or with a stop job. A grace longer than the unit's own is a plain
    SIGTERM, which leaves no such trace in a trainer that obeys it.
    """
    asked = seen.record.kill_requested
    if asked is None or asked.sent:
        return asked
    soon = when is not None and 0 <= when - asked.time <= _STOP_TAKES
    job = seen.record.exit is not None and seen.record.exit.stop_requested
    return asked if soon and (job or ending.code == "killed" or asked.grace > STOP_SECONDS) else None


def _lasted(seen: Snapshot, when: float | None) -> str:
    started = seen.record.started
    return f"after {age(when - started.time)}" if started is not None and when is not None else ""


def _why(seen: Snapshot, ending: Ending, failure: str | None) -> str:
    """What lies behind the exit status, the surest first."""
    if ending.result == "oom-kill":
        return "killed by the kernel's OOM killer"
    if ending.result == "watchdog":
        return "the watchdog saw no step for too long; every thread's stack is in the log"
    if ending.code == "killed" and ending.status == "KILL":
        # A cgroup v1 or a race in systemd reports an OOM kill as a plain signal.
        sure = seen.record.exit is not None and bool(seen.record.exit.oom_kills)
        return "killed by the kernel's OOM killer" if sure else "not by dflash; the OOM killer is likely"
    if failure is not None:
        return failure
    if ending.code == "exited" and ending.status in _SETUP:
        return _SETUP[ending.status]
    if seen.disk is not None and seen.disk.full:
        return "the disk is full"
    return visible(last_error(_lines(seen)) or "", 160)


def _alive(seen: Snapshot, unit: UnitRunning) -> Verdict:
    """systemd says that the main process runs: does it get anywhere?"""
    silent = _silence(seen, unit)
    if silent is not None and silent <= seen.quiet_after:
        if isinstance(seen.log, LogFresh) and seen.log.size == 0 and seen.progress is None:
            return Starting(reason="no log line yet")
        return Running(reason=_running_reason(seen, unit))
    if isinstance(seen.log, LogUnknown):  # a clock that jumped makes the metrics look old as well
        return Unknown(reason=seen.log.reason)
    what = "the log is gone" if isinstance(seen.log, LogGone) else f"no log line for {age(silent or 0)}"
    if seen.disk is not None and seen.disk.full:
        what = f"the disk is full, so the log cannot grow; {what}"
    return _silent(seen, what)


def _silence(seen: Snapshot, unit: UnitRunning) -> float | None:
    """Seconds since the last sign of progress of any kind; None when nothing ever gave one that can be dated."""
    ages = []
    if isinstance(seen.log, LogFresh | LogSilent):
        ages.append(seen.log.age)
    if seen.progress is not None:
        ages.append(seen.progress.age)
    if unit.watchdog_age is not None:
        ages.append(unit.watchdog_age)
    return min(ages, default=None)


def _running_reason(seen: Snapshot, unit: UnitRunning) -> str:
    parts = [unit.status_text or ""]
    if isinstance(seen.log, LogGone):
        parts.append("its log is gone")
    elif isinstance(seen.log, LogUnknown):
        parts.append(seen.log.reason)
    if seen.disk is not None and seen.disk.full:
        parts.append("the disk is full")
    if isinstance(seen.gpu, GpuDevices):
        shares = work_by_role(seen.gpu.devices, seen.roles)
        if shares is not None and "idle" in shares:
            parts.append(shares)
    return "; ".join(part for part in parts if part)


def _silent(seen: Snapshot, what: str) -> Verdict:
    """Alive but silent for too long: the GPUs decide, or the CPU where the run uses none."""
    cores = None if seen.cpu is None else seen.cpu.cores
    if not seen.roles.all:
        if cores is None:
            return Unknown(reason=f"{what}, and its CPU use could not be read")
        if cores < _IDLE_CORES:
            return Stalled(reason=f"{what}, and it uses no CPU")
        return BusyQuiet(reason=f"{what}, but it keeps {cores:.1f} cores busy")
    match seen.gpu:
        case GpuUnknown(reason=reason):
            return Unknown(reason=f"{what}; GPUs: {reason}")
        case GpuNone():
            return Unknown(reason=f"{what}; the run uses GPUs, but the container shows none")
        case GpuDevices(devices=devices):
            return _by_gpus(seen, what, [device for device in devices if device.index in seen.roles.all], cores)


def _by_gpus(seen: Snapshot, what: str, devices: list[Device], cores: float | None) -> Verdict:
    missing = sorted(set(seen.roles.all) - {device.index for device in devices})
    if missing:
        return Unknown(reason=f"{what}; nvidia-smi does not report GPU {', '.join(map(str, missing))}")
    shares = work_by_role(devices, seen.roles)
    if any(device.works for device in devices):
        return BusyQuiet(reason=f"{what}, but its GPUs work" + (f": {shares}" if shares else ""))
    if any(device.works is None for device in devices):
        return Unknown(reason=f"{what}; its GPUs do not report their use")
    spinning = [device for device in devices if device.spins]
    if spinning:
        watts = max(device.power or 0.0 for device in spinning)
        return Stalled(reason=f"{what}; GPU 100 % at {watts:.0f} W: a kernel waits for a peer that does not come")
    if seen.progress is None and cores is not None and cores >= _IDLE_CORES:
        return BusyQuiet(reason=f"{what}, but it keeps {cores:.1f} cores busy before its first step")
    held = ", with memory held" if any(device.holds_memory for device in devices) else ""
    return Stalled(reason=f"{what}; GPUs idle{held}")
