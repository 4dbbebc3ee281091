"""Remote programs run in the test's own process, over a connection that breaks where a test says."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_ops.remote.channel import PeerGone, Refusal
from dflash_ops.transport.base import ConnectionLost, Frame, Program, RemoteRefusal
from dflash_ops.transport.fake import FakeTransport


class InProcess(FakeTransport):
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
        super().__init__({})
        self.root = root
        self.cuts = list(cuts or [])
        self.meanwhile = meanwhile or {}
        self.polls = list(polls or [])

    def _answer(self, program: Program, request: dict[str, Any], payload: bytes) -> Iterator[Frame]:
        self.meanwhile.get(self.round_trips, lambda: None)()
        self.round_trips += 1
        channel = _Channel(self.cuts.pop(0) if self.cuts else None, self.polls, payload)
        module = importlib.import_module(f"dflash_ops.remote.{program.verb}")

        def remote() -> None:
            try:
                channel.send(Frame("result", _sent(module.main({**request, "root": str(self.root)}, channel))))
            except PeerGone:
                channel.send(ConnectionLost("the connection broke"))
            except Refusal as refusal:
                code, text, hint = refusal.code, refusal.message, refusal.hint
                channel.send(RemoteRefusal(code, text, hint, reason=refusal.reason))
            except BaseException as error:
                channel.send(error)

        thread = threading.Thread(target=remote)
        thread.start()
        try:
            while True:
                frame = channel.frames.get(timeout=30)
                if isinstance(frame, BaseException):
                    raise frame
                yield frame
                if frame.kind == "result":
                    return
        finally:
            channel.closed.set()
            thread.join(30)


class _Channel:
    """The remote end. Frames are handed over one by one, so the program is never ahead of its reader by more."""

    def __init__(self, cut: int | None, polls: list[Callable[[], None]], payload: bytes) -> None:
        self.frames: queue.Queue[Frame | BaseException] = queue.Queue(1)
        self.closed = threading.Event()
        self.payload = io.BytesIO(payload)
        self._left = cut
        self._polls = polls

    def send(self, frame: Frame | BaseException) -> None:
        while not self.closed.is_set():
            with contextlib.suppress(queue.Full):
                self.frames.put(frame, timeout=0.01)
                return

    def event(self, data: bytes | None = None, **value: Any) -> None:
        self.beat()
        if self._left is not None:
            self._left -= 1
        self.send(Frame("event", _sent(value) if data is None else {**_sent(value), "data": data}))

    def pause(self, seconds: float) -> None:
        self.beat()
        if self._polls:
            self._polls.pop(0)()
        else:
            self.closed.wait(0.002)

    def receive(self, limit: int) -> bytes:
        self.beat()
        return self.payload.read(limit)

    def beat(self) -> None:
        if self._left == 0 or self.closed.is_set():
            raise PeerGone


def _sent(value: dict[str, Any]) -> dict[str, Any]:
    """As it comes out of a frame at the other end."""
    sent: dict[str, Any] = json.loads(json.dumps(value))
    return sent
