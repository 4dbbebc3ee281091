"""Keeps a stream going: connects again, with a growing pause, and asks from where the last one ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing

from dflash_ops.transport.base import ConnectionLost, Frame, Unanswered, Unreachable
from dflash_ops.verbs.session import Session

_LONGEST_PAUSE = 20.0


def lasting(
    session: Session,
    verb: str,
    request: Callable[[], Mapping[str, object]],
    *,
    until: float | None = None,
    payload: Callable[[], Iterable[bytes]] | None = None,
    meanwhile: str = "the run is not affected; Ctrl-C stops looking",
) -> Iterator[Frame]:
    """The frames of a remote program up to its result, over as many connections as it takes.

    A failure before the first frame is raised: there is nothing yet to keep up. Later ones are waited out, for ever or
    until the monotonic moment `until`; refusals and missing permissions are raised at once.

    Args:
        request: makes the request of each connection, so that it can begin where the last one ended.
        payload: makes what follows the request, after it was made.
        meanwhile: said while the connection is away.
    """
    reached = False
    wait = 1.0
    while True:
        try:
            with closing(_stream(session, verb, request(), payload)) as frames:
                for frame in frames:
                    if reached and wait > 1.0:
                        session.say("connected again")
                    reached, wait = True, 1.0
                    yield frame
                    if frame.kind == "result":
                        return
        except (Unreachable, Unanswered) as error:
            if not reached or (until is not None and time.monotonic() + wait >= until):
                raise
            what = "the connection broke" if isinstance(error, ConnectionLost) else error.message
            session.say(f"{what}; trying again in {wait:.0f} s ({meanwhile})")
            time.sleep(wait)
            wait = min(_LONGEST_PAUSE, wait * 2)


def _stream(
    session: Session, verb: str, request: Mapping[str, object], payload: Callable[[], Iterable[bytes]] | None
) -> Generator[Frame, None, None]:
    yield from session.stream(verb, request, payload=payload() if payload is not None else None)
