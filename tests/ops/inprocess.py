"""Remote programs run in the test's own process, over a connection that breaks where a test says."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_ops.remote.common import PeerGone, Refusal
from dflash_ops.transport.base import ConnectionLost, Frame, Program, RemoteRefusal, Reply


class InProcess:
    """A transport that runs the real remote programs; the connection breaks after the given numbers of frames.

    `meanwhile[n]` happens before connection n; `polls` happen one by one while a program waits for more.
    """

    def __init__(
        self,
        root: Path,
        cuts: list[int] | None = None,
        meanwhile: dict[int, Callable[[], None]] | None = None,
        polls: list[Callable[[], None]] | None = None,
    ) -> None:
        self.root = root
        self.cuts = list(cuts or [])
        self.meanwhile = meanwhile or {}
        self.polls = list(polls or [])
        self.round_trips = 0

    def stream(
        self, program: Program, request: dict[str, Any], deadline_between_frames: float = 30.0
    ) -> Iterator[Frame]:
        self.meanwhile.get(self.round_trips, lambda: None)()
        self.round_trips += 1
        channel = _Channel(self.cuts.pop(0) if self.cuts else None, self.polls)
        module = importlib.import_module(f"dflash_ops.remote.{program.verb}")
        try:
            channel.frames.append(Frame("result", _sent(module.main({**request, "root": str(self.root)}, channel))))
        except PeerGone:
            yield from channel.frames
            raise ConnectionLost("the connection broke") from None
        except Refusal as refusal:
            raise RemoteRefusal(refusal.code, refusal.message, refusal.hint, reason=refusal.reason) from None
        yield from channel.frames

    def run(
        self,
        program: Program,
        request: dict[str, Any],
        payload: Iterable[bytes] | None = None,
        deadline: float = 60.0,
    ) -> Reply:
        *events, last = self.stream(program, request)
        return Reply(last.value, events)

    def close(self) -> None:
        pass


class _Channel:
    def __init__(self, cut: int | None, polls: list[Callable[[], None]]) -> None:
        self.frames: list[Frame] = []
        self.payload = io.BytesIO()
        self._left = cut
        self._polls = polls

    def event(self, **value: Any) -> None:
        if self._left is not None:
            if self._left == 0:
                raise PeerGone
            self._left -= 1
        self.frames.append(Frame("event", _sent(value)))

    def pause(self, seconds: float) -> None:
        if self._left == 0:
            raise PeerGone
        if self._polls:
            self._polls.pop(0)()

    def beat(self) -> None:
        pass


def _sent(value: dict[str, Any]) -> dict[str, Any]:
    """As it comes out of a frame at the other end."""
    sent: dict[str, Any] = json.loads(json.dumps(value))
    return sent
