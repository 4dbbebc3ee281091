"""Reads whether the run's systemd unit is alive, and how it ended.

`systemctl show` answers with status 0 and `Result=success` for a unit that never existed, so LoadState is read before
anything else. The run directory's `started.json` and `exit.json` say what systemd has forgotten.
"""

from __future__ import annotations

import signal
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_ops.run.probes import Reading
from dflash_ops.run.record import ExitRecord
from dflash_ops.text import visible

_CODES = {"1": "exited", "2": "killed", "3": "dumped"}  # CLD_* of <signal.h>, as ExecMainCode prints them
_NOT_SET = {"", "0", "18446744073709551615", "[not set]"}


class Ending(BaseModel):
    """How a main process ended, in the words of systemd's SERVICE_RESULT, EXIT_CODE and EXIT_STATUS."""

    model_config = ConfigDict(frozen=True)

    result: str = Field(description="success, exit-code, signal, core-dump, watchdog, oom-kill, timeout, ...")
    code: Literal["exited", "killed", "dumped"] | None = Field(None, description="None: it never started")
    status: str | None = Field(None, description="Exit status in decimal, or the signal's name without SIG")

    @classmethod
    def of_record(cls, record: ExitRecord) -> Ending:
        """What systemd told the recorder; code and status are missing if the main process never started."""
        code = record.exit_code if record.exit_code in _CODES.values() else None
        status = None if code is None or record.exit_status is None else visible(record.exit_status, 40)
        return cls.model_validate({"result": visible(record.result, 40), "code": code, "status": status})

    @property
    def clean(self) -> bool:
        """Whether the process ended by itself with status 0."""
        return self.result == "success" and self.code == "exited" and self.status == "0"

    def describe(self) -> str:
        """`exit 1`, `SIGKILL`, `watchdog (SIGABRT)`, `timeout (SIGKILL)`, `did not start (exit-code)`."""
        if self.code is None or self.status is None:
            return f"did not start ({self.result})"
        how = f"exit {self.status}" if self.code == "exited" else f"SIG{self.status}"
        plain = self.result in ("success", "exit-code", "signal", "core-dump")
        return how if plain else f"{self.result} ({how})"


class _Alive(Reading):
    sub_state: str
    invocation_id: str
    main_pid: int
    seconds: float | None = Field(None, description="Since the main process started")
    status_text: str | None = Field(None, description="The trainer's last STATUS=")
    watchdog_age: float | None = Field(None, description="Seconds since the last WATCHDOG=1; None: no watchdog")
    memory: int | None = Field(None, description="Bytes charged to the unit")
    tasks: int | None = None
    answer: Literal["yes"] = "yes"


class UnitStarting(_Alive):
    kind: Literal["starting"] = "starting"


class UnitRunning(_Alive):
    kind: Literal["running"] = "running"


class UnitStopping(_Alive):
    kind: Literal["stopping"] = "stopping"


class UnitEnded(Reading):
    """systemd still knows the unit, and its process is gone."""

    kind: Literal["ended"] = "ended"
    invocation_id: str
    ending: Ending
    answer: Literal["no"] = "no"


class UnitAbsent(Reading):
    """systemd does not know the unit: it ended well, its container restarted, or it never was."""

    kind: Literal["absent"] = "absent"
    answer: Literal["no"] = "no"


class UnitUnknown(Reading):
    kind: Literal["unknown"] = "unknown"
    reason: str
    answer: Literal["unknown"] = "unknown"


UnitReading = Annotated[
    UnitStarting | UnitRunning | UnitStopping | UnitEnded | UnitAbsent | UnitUnknown, Field(discriminator="kind")
]


class Shown(BaseModel):
    """systemd answered."""

    kind: Literal["shown"] = "shown"
    properties: dict[str, str]


class NotShown(BaseModel):
    """systemd did not answer."""

    kind: Literal["error"] = "error"
    message: str


RawUnit = Annotated[Shown | NotShown, Field(discriminator="kind")]


def read_unit(raw: RawUnit, monotonic: float) -> UnitReading:
    """`systemctl show` of the run's unit as a reading. Total: whatever systemd said, there is a reading for it.

    Args:
        raw: what the remote program found.
        monotonic: the container's CLOCK_MONOTONIC in seconds, read in the same probe.
    """
    if isinstance(raw, NotShown):
        return UnitUnknown(reason=visible(raw.message, 300))
    if "LoadState" not in raw.properties:
        return UnitUnknown(reason="systemd did not say whether it knows the unit")
    return _read_properties(raw.properties, monotonic)


def _read_properties(shown: dict[str, str], monotonic: float) -> UnitReading:
    load, active = shown["LoadState"], shown.get("ActiveState", "")
    sub_state = visible(shown.get("SubState", ""), 40)
    invocation_id = visible(shown.get("InvocationID", ""), 64)
    if load == "not-found":
        return UnitAbsent()
    if load != "loaded":
        return UnitUnknown(reason=f"systemd says LoadState={visible(load, 40)}")
    if active in ("failed", "inactive"):
        return UnitEnded(invocation_id=invocation_id, ending=_ending(shown))

    def age(name: str) -> float | None:
        micros = _count(shown.get(name))
        return None if micros is None else max(0.0, monotonic - micros / 1e6)

    alive = {
        "sub_state": sub_state,
        "invocation_id": invocation_id,
        "main_pid": _count(shown.get("MainPID")) or 0,
        "seconds": age("ExecMainStartTimestampMonotonic"),
        "status_text": visible(shown.get("StatusText", ""), 200) or None,
        "watchdog_age": age("WatchdogTimestampMonotonic"),
        "memory": _count(shown.get("MemoryCurrent")),
        "tasks": _count(shown.get("TasksCurrent")),
    }
    if active == "activating":
        return UnitStarting.model_validate(alive)
    if active == "deactivating":
        return UnitStopping.model_validate(alive)
    if active in ("active", "reloading") and sub_state != "exited":
        return UnitRunning.model_validate(alive)
    return UnitUnknown(reason=f"systemd says {visible(active, 40)} ({sub_state})")


def _count(value: str | None) -> int | None:
    if value is None or value in _NOT_SET or not (value.isascii() and value.isdigit()):
        return None
    return int(value)


def _ending(shown: dict[str, str]) -> Ending:
    code = _CODES.get(shown.get("ExecMainCode", ""))
    status = shown.get("ExecMainStatus", "")
    if code in ("killed", "dumped") and status.isascii() and status.isdigit():
        status = signal_name(int(status))
    result = visible(shown.get("Result", ""), 40) or "unknown"
    return Ending.model_validate({"result": result, "code": code, "status": status if code else None})


def signal_name(number: int) -> str:
    """`KILL` for 9; the number where it has no name."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)
