"""Waits until a run has reached a goal; the exit code is the run's state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from dflash_ops.document import Document
from dflash_ops.errors import DflashError, Exit
from dflash_ops.remote.protocol import StatusRequest
from dflash_ops.run.probes.log import LogFresh, LogSilent
from dflash_ops.run.record import check_run_name
from dflash_ops.run.status import Status
from dflash_ops.transport.base import TransportError
from dflash_ops.verbs.reconnect import lasting
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import LOG_LINES, describe

Goal = Literal["started", "step", "finished"]
_EVERY = 2.0


@dataclass(frozen=True)
class WaitOptions:
    run: str | None = None
    goal: Goal = "finished"
    timeout: float | None = None


class Waited(Document):
    """The answer of `dflash wait`."""

    kind: Literal["wait"] = "wait"
    goal: Goal
    reached: bool
    seconds: float = Field(description="Spent waiting")
    status: Status

    @property
    def exit_code(self) -> Exit:
        """0 when it came as far, or ended well; else as the run ended, or that it has not finished."""
        return Exit.OK if self.reached else self.status.exit_code


def reached(status: Status, goal: Goal) -> bool:
    """Whether the run has come this far. A run that ended well has passed every goal."""
    if status.state == "succeeded":
        return True
    if goal == "started":
        wrote = isinstance(status.log, LogFresh | LogSilent) and status.log.size > 0
        return status.unit.kind == "running" and (wrote or status.progress is not None)
    return goal == "step" and status.progress is not None


def wait(session: Session, options: WaitOptions) -> Waited:
    """Wait until the run has come as far as `goal`, has ended, or `timeout` seconds have passed.

    Each change of state but the last is said, which the answer holds. Raises DflashError when the time is up before the
    container answered at all.
    """
    begin = time.monotonic()
    end = None if options.timeout is None else begin + options.timeout
    status: Status | None = None
    try:
        for current in _statuses(session, options.run, end):
            said = status is not None and current.state == status.state
            status = current
            if reached(status, options.goal) or status.verdict.finished or (end and time.monotonic() >= end):
                break  # the answer says it
            if not said:
                session.say(f"run {current.run} {current.state}" + (f": {current.reason}" if current.reason else ""))
    except TransportError:
        if status is None or end is None or time.monotonic() < end - _EVERY:
            raise
    if status is None:
        raise DflashError(
            Exit.TEMPORARY, "the container did not answer before the time was up", "give a longer --timeout"
        )
    return Waited(
        goal=options.goal,
        reached=reached(status, options.goal),
        seconds=round(time.monotonic() - begin, 1),
        status=status,
    )


def _statuses(session: Session, run: str | None, end: float | None) -> Iterator[Status]:
    """Without the GPUs: what is waited for does not need them."""
    chosen = None if run is None else check_run_name(run)

    def request() -> StatusRequest:
        return {"root": session.root, "run": chosen, "lines": LOG_LINES, "gpu": False, "every": _EVERY}

    for frame in lasting(session, "status", request, until=end):
        current = describe(session, frame.value)
        chosen = current.run
        yield current
