"""Asks for a run's status: three probes in one round trip, and a verdict.

The answer's models are imported while the container works on it: reaching the container takes longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dflash_ops.remote.protocol import StatusRequest
from dflash_ops.run.record import check_run_name
from dflash_ops.text import age
from dflash_ops.transport.base import Unanswered, Unreachable
from dflash_ops.verbs.reconnect import lasting
from dflash_ops.verbs.session import Session

if TYPE_CHECKING:
    from dflash_ops.run.status import Status

LOG_LINES = 200  # enough to find the first cause of a failure above its consequences


def status(session: Session, run: str | None, meanwhile: Callable[[], object] | None = None) -> Status:
    """Probe a run (the newest when `run` is None); `meanwhile`, too, is called while the container answers.

    Raises RemoteRefusal when there is no such run, and TransportError, which says what was last known, when the
    container cannot be asked.
    """
    if run is not None:
        check_run_name(run)

    def work() -> None:
        import dflash_ops.run.status  # noqa: F401

        if meanwhile is not None:
            meanwhile()

    try:
        request: StatusRequest = {"root": session.root, "run": run, "lines": LOG_LINES}
        reply = session.call("status", request, deadline=30, meanwhile=work)
    except (Unreachable, Unanswered) as error:  # others need something set up first: what was seen is no comfort then
        from dflash_ops.run.last_known import last_seen

        seen = last_seen(session.inventory.path, session.container_name, run)
        if seen is not None:
            past = f"{seen.run} was {seen.state} when last seen, {age(time.time() - seen.time)} ago"
            error.hint = f"{error.hint}; {past}" if error.hint else past
        raise
    return describe(session, reply.value)


def look(session: Session, run: str | None) -> Status:
    """A run (the newest when `run` is None) without its GPUs, for verbs that ask before they act.

    Raises DflashError when there is none.
    """
    chosen = None if run is None else check_run_name(run)
    request: StatusRequest = {"root": session.root, "run": chosen, "lines": LOG_LINES, "gpu": False}
    return describe(session, session.call("status", request, deadline=30).value)


def watch(session: Session, run: str | None, every: float = 2.0) -> Iterator[Status]:
    """A status every few seconds over one connection, until the run is over; reconnects by itself."""
    if run is not None:
        check_run_name(run)
    chosen = run

    def request() -> StatusRequest:
        return {"root": session.root, "run": chosen, "lines": LOG_LINES, "every": every}

    for frame in lasting(session, "status", request):
        current = describe(session, frame.value)
        chosen = current.run  # "newest" is decided once
        yield current


def describe(session: Session, value: dict[str, Any]) -> Status:
    """The answer of the container's half, judged, and kept as what was last known."""
    from dflash_ops.run.last_known import remember
    from dflash_ops.run.probes.snapshot import read_snapshot
    from dflash_ops.run.status import status_of

    seen = read_snapshot(value)
    result = status_of(seen, session.container_name)
    remember(session.inventory.path, session.container_name, result.run, result.state, result.reason)
    return result
