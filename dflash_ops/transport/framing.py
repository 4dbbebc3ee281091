"""Finds frames in a stream of bytes; skips noise around them, refuses giant or malformed ones.

A frame is a line: MARK and a JSON object with `kind` and `value`. With `bytes`, that many bytes follow as they are, and
a newline: what is no text (compressed logs, weights) would take a third more as base64, and far longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dflash_ops.remote.protocol import MARK
from dflash_ops.transport.base import BadAnswer, NoPython

STARTED = b"started"  # the first line that a program sends
MAX_FRAME = 8 * 1024 * 1024
MAX_NOISE = 16 * 1024 * 1024  # between two frames: a motd is never that long
MAX_ANSWER = 256 * 1024 * 1024  # of a program that is run to its end: its events are kept until then
Parsed = tuple[str, dict[str, Any]]
KINDS = ("event", "result", "error", "beat")


class FrameDecoder:
    """Feed it stdout as it comes; it yields (kind, value).

    Args:
        limit: bytes that may come in all; None: a stream, whose frames are not kept.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._fed = 0
        self._line = bytearray()  # the line so far; of noise only its first bytes
        self._head: Parsed = ("", {})  # the frame whose bytes are coming
        self._body = bytearray()  # those that came, the newline after them too
        self._missing = 0  # those that have yet to come
        self._noise = 0
        self.started = False  # a program runs: what is said from now on, the container says
        self.noise_tail = b""  # the last noise, for error messages

    def feed(self, data: bytes) -> Iterator[Parsed]:
        """Raises BadAnswer when the other side breaks the rules, NoPython when it has no Python."""
        self._fed += len(data)
        if self._limit is not None and self._fed > self._limit:
            raise BadAnswer(f"the container sent an answer of more than {self._limit >> 20} MiB; it was refused")
        start = 0
        while start < len(data):
            if self._missing:
                piece = data[start : start + self._missing]
                self._body += piece
                self._missing -= len(piece)
                frame = None if self._missing else self._with_body()
            else:
                piece = data[start : data.find(b"\n", start) + 1 or len(data)]
                frame = self._take_line(piece)
            start += len(piece)
            if frame is not None:
                yield frame

    def _take_line(self, piece: bytes) -> Parsed | None:
        """A line, or a part of one; the frame that is complete by it."""
        self._line += piece.rstrip(b"\n")
        is_frame = self._line.startswith(MARK)
        if is_frame and len(self._line) > MAX_FRAME:
            raise _giant()
        if not is_frame:
            self._skip(piece)
            del self._line[len(MARK) :]
        if not piece.endswith(b"\n"):
            return None
        line = bytes(self._line)
        self._line.clear()
        if not is_frame:
            return None
        self._noise = 0
        self.started = True
        if line[len(MARK) :].strip() == STARTED:
            return None
        kind, value, size = self._parse(line[len(MARK) :])
        if size is None:
            return kind, value
        self._head, self._missing = (kind, value), size + 1
        return None

    def _with_body(self) -> Parsed:
        """The frame whose last byte has come."""
        kind, value = self._head
        if not self._body.endswith(b"\n"):
            raise _malformed(bytes(self._body[-200:]))
        value["data"] = bytes(self._body[:-1])
        self._body.clear()
        return kind, value

    def _skip(self, piece: bytes) -> None:
        self._noise += len(piece)
        self.noise_tail = (self.noise_tail + piece[-4096:])[-4096:]
        if self._noise > MAX_NOISE:
            raise BadAnswer(f"the host sent more than {MAX_NOISE >> 20} MiB that are no answer; it was refused")

    @staticmethod
    def _parse(body: bytes) -> tuple[str, dict[str, Any], int | None]:
        """Kind, value, and how many bytes follow."""
        if body.strip() == b"no-python3":
            raise NoPython(
                "there is no python3 (3.8 or newer) in the container",
                "install it there, e.g. `apt-get install python3` inside the container",
            )
        try:
            frame = json.loads(body)
            kind, value, size = frame["kind"], frame["value"], frame.get("bytes")
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise _malformed(body) from error
        if kind not in KINDS or not isinstance(value, dict):
            raise BadAnswer("the container sent a frame of an unknown kind; it was refused", detail=repr(body[:200]))
        if size is not None and (type(size) is not int or size < 0):
            raise _malformed(body)
        if size is not None and size > MAX_FRAME:
            raise _giant()
        return kind, value, size


def _giant() -> BadAnswer:
    return BadAnswer(f"the container sent a frame of more than {MAX_FRAME >> 20} MiB; it was refused")


def _malformed(body: bytes) -> BadAnswer:
    return BadAnswer("the container sent a malformed frame; it was refused", detail=repr(body[:200]))
