"""Speaks with the laptop: frames out, payload in, refusals as errors."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, BinaryIO, Dict, Mapping, NoReturn, Optional

from dflash_ops.remote.protocol import CONFIGURATION, MARK, TEMPORARY, Failure


class Refusal(Exception):
    """The program cannot do what was asked: one sentence, its cure, an exit code, a stable word."""

    def __init__(self, code: int, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.reason = reason


class PeerGone(Exception):
    """Nobody listens any more: the program ends without a word."""


class Channel:
    """Frames out, payload in."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.payload = source
        self._sink = sink
        self._read_ahead: Optional[bytes] = None  # of the payload; None: nothing was read yet
        self._last = time.monotonic()

    def _write(self, frame: Dict[str, Any], data: Optional[bytes] = None) -> None:
        tail = [] if data is None else [data, b"\n"]
        if data is not None:
            frame["bytes"] = len(data)
        line = json.dumps(frame, ensure_ascii=True, separators=(",", ":"))
        try:
            self._sink.write(b"".join([b"\n", MARK, line.encode("ascii"), b"\n", *tail]))
            self._sink.flush()
        except OSError as error:
            raise PeerGone() from error
        self._last = time.monotonic()

    def event(self, data: Optional[bytes] = None, **value: Any) -> None:
        """Tell the laptop something before the result; `data` goes as it is, after the frame. Raises PeerGone."""
        self._write({"kind": "event", "value": value}, data)

    def beat(self) -> None:
        """Show life when nothing was said for five seconds. Raises PeerGone."""
        if time.monotonic() - self._last >= 5:
            self._write({"kind": "beat", "value": {}})

    def pause(self, seconds: float) -> None:
        """Sleep, showing life. In a stream, stdin stays open as long as the laptop listens: its end ends the program.

        Raises PeerGone.
        """
        self.beat()
        ready, _, _ = select.select([self.payload], [], [], seconds)
        if ready and not os.read(self.payload.fileno(), 4096):
            raise PeerGone()

    def receive(self, limit: int, idle: float = 30.0) -> bytes:
        """Some of the payload, at most `limit` bytes; empty at its end. In a stream it shows life while it waits.

        Raises PeerGone after `idle` seconds without a byte: a connection that was cut unseen must not hold what the
        next one needs. The first call waits for the first byte, whatever its limit.
        """
        if not self._read_ahead:
            if self._read_ahead is not None:  # the first read takes what stdin's buffer holds, which select can't see
                self._wait_for_payload(idle)
            self._read_ahead = self.payload.read1(1 << 18)  # type: ignore[attr-defined]
        data, self._read_ahead = self._read_ahead[:limit], self._read_ahead[limit:]
        return data

    def _wait_for_payload(self, idle: float) -> None:
        end = time.monotonic() + idle
        while not select.select([self.payload], [], [], 1.0)[0]:
            self.beat()
            if time.monotonic() > end:
                raise PeerGone()

    def result(self, value: Mapping[str, Any]) -> None:
        """The last frame."""
        self._write({"kind": "result", "value": value})

    def error(self, value: Failure) -> None:
        """The last frame, when there is no result."""
        self._write({"kind": "error", "value": value})


def serve(request: Dict[str, Any]) -> None:
    """Run the verb that the request names, within the seconds that it grants."""
    channel = Channel(sys.stdin.buffer, sys.stdout.buffer)

    def out_of_time(signum: int, frame: Any) -> NoReturn:
        with contextlib.suppress(PeerGone):
            message = "the container did not finish `%s` within %d s" % (request["verb"], request["limit"])
            channel.error({"code": TEMPORARY, "message": message, "hint": "try again", "reason": "limit"})
        os._exit(1)

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(int(request["limit"]))
    try:
        module = importlib.import_module("dflash_ops.remote." + request["verb"])
        channel.result(module.main(request["request"], channel))
    except Refusal as refusal:
        with contextlib.suppress(PeerGone):
            channel.error(
                {"code": refusal.code, "message": refusal.message, "hint": refusal.hint, "reason": refusal.reason}
            )
    except PeerGone:
        pass
    except OSError as error:
        with contextlib.suppress(PeerGone):
            channel.error(_disk_error(error))
    except Exception as error:
        with contextlib.suppress(PeerGone):
            message = "%s: %s" % (type(error).__name__, error)
            channel.error({"code": 70, "message": message, "hint": "", "detail": _traceback()})


def _disk_error(error: OSError) -> Failure:
    where = " at %s" % error.filename if error.filename else ""
    message = "the container said: %s%s" % (error.strerror or error, where)
    hint = "free space there (`dflash gc` helps), then try again" if error.errno in (28, 122) else ""
    return {
        "code": CONFIGURATION,
        "message": message,
        "hint": hint,
        "reason": "os-error",
        "detail": _traceback(),
    }


def _traceback() -> str:
    import traceback  # costs milliseconds that only failures shall pay

    return traceback.format_exc()
