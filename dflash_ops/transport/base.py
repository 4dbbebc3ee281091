"""Defines a transport: it runs one program in the container and returns its answer, or streams its frames.

A program is a module of `dflash_ops.remote` with `main(request, channel)`. It answers in frames: any number of
events, then one result or one error. Every error a transport raises is a `TransportError` or, when the program
itself refused, a `RemoteRefusal`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dflash_ops.errors import DflashError, Exit

FrameKind = Literal["event", "result", "error"]


@dataclass(frozen=True, slots=True)
class Program:
    """The remote module to run, by name (`dflash_ops.remote.<verb>`)."""

    verb: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One framed answer. `value` is JSON from the container: data to check, never to trust. The only bytes in it are
    `data`: what followed the frame as it is.
    """

    kind: FrameKind
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a program and the events that came before it."""

    value: dict[str, Any]
    events: list[Frame] = field(default_factory=list)


def result_of(frames: Iterable[Frame], told: Callable[[Frame], object]) -> dict[str, Any]:
    """The value of the result that ends `frames`; `told` is given each event before it."""
    for frame in frames:
        if frame.kind == "result":
            return frame.value
        told(frame)
    raise AssertionError("frames end with a result or an error")


class Transport(Protocol):
    """A way into one container. One object serves a whole verb and is closed at its end."""

    round_trips: int  # programs started so far

    def run(
        self,
        program: Program,
        request: Mapping[str, object],
        payload: Iterable[bytes] | None = None,
        deadline: float = 60.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> Reply:
        """Run to the end within `deadline` seconds. `payload` follows the request on the program's stdin.

        `meanwhile` is called once the program is on its way: importing what reads its answer then costs no time.
        """
        ...

    def stream(
        self,
        program: Program,
        request: Mapping[str, object],
        deadline_between_frames: float = 30.0,
        payload: Iterable[bytes] | None = None,
    ) -> Iterator[Frame]:
        """Yield events as they come, then the result frame. Closing the iterator ends the remote program.

        `payload` follows the request on the program's stdin, which stays open after it.
        Heartbeats (`channel.beat()` in the program) renew the deadline and are not yielded.
        """
        ...

    def close(self) -> None: ...


class TransportError(DflashError):
    """The container was not reached or did not answer; nothing is known about the run."""

    exit_code = Exit.UNREACHABLE

    def __init__(self, message: str, hint: str = "", *, detail: str = "") -> None:
        super().__init__(self.exit_code, message, hint, detail=detail)


class Unreachable(TransportError):
    """Host or container cannot be reached."""


class ConnectionLost(Unreachable):
    """The connection broke, or the program ended, before its result came. A new try may succeed."""


class Unanswered(TransportError):
    """A deadline passed, the container is locked or frozen: try again later."""

    exit_code = Exit.TEMPORARY


class NotPermitted(TransportError):
    """Key, host key, sudo or root."""

    exit_code = Exit.PERMISSION


class Misconfigured(TransportError):
    """No pct, no container, no python3: something must be set up first."""

    exit_code = Exit.CONFIGURATION


class NoPython(Misconfigured):
    """There is a shell and nothing that runs the program."""


class BadAnswer(TransportError):
    """What came back is not what a remote program sends: giant, malformed, or not for us."""


class RemoteRefusal(DflashError):
    """The remote program refused, with its own code, sentence and cure. `reason` is a stable word for code."""

    def __init__(self, code: int, message: str, hint: str = "", *, reason: str = "", detail: str = "") -> None:
        super().__init__(code, message, hint, detail=detail)
        self.reason = reason


class Deadline:
    """A point in time that may be pushed on by a sign of life."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    def renew(self) -> None:
        """Start the full time anew."""
        self._end = time.monotonic() + self.seconds


class Exchange(Protocol):
    """One command on a host: iterate over its stdout; afterwards read `stderr` (its last 64 KiB) and `status`."""

    stderr: bytes
    status: int | None  # exit code; None when the host did not tell

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class Host(Protocol):
    """Runs one command line by the login shell of a machine."""

    label: str  # for messages

    def exchange(self, command: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool) -> Exchange:
        """Start `command`. With `keep_stdin` its stdin stays open after the last chunk until the exchange is closed.

        Iterating raises Unanswered when `deadline` passes and ConnectionLost when the machine goes away.
        """
        ...

    def close(self) -> None: ...
