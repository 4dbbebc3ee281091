"""Which frames are in a stream of bytes? Noise around them is skipped; giant or malformed frames are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dflash_ops.transport.base import BadAnswer, Misconfigured

MARK = b"@@DFLASH "
MAX_FRAME = 8 * 1024 * 1024
MAX_NOISE = 16 * 1024 * 1024  # between two frames: a motd is never that long
MAX_ANSWER = 256 * 1024 * 1024  # of a program that is run to its end: its events are kept until then
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
        self._noise = 0
        self.noise_tail = b""  # the last noise, for error messages

    def feed(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """Raises BadAnswer when the other side breaks the rules, Misconfigured when it has no Python."""
        self._fed += len(data)
        if self._limit is not None and self._fed > self._limit:
            raise BadAnswer(f"the container sent an answer of more than {self._limit >> 20} MiB; it was refused")
        for piece in _lines(data):
            self._line += piece.rstrip(b"\n")
            is_frame = self._line.startswith(MARK)
            if is_frame and len(self._line) > MAX_FRAME:
                raise BadAnswer(f"the container sent a frame of more than {MAX_FRAME >> 20} MiB; it was refused")
            if not is_frame:
                self._skip(piece)
                del self._line[len(MARK) :]
            if piece.endswith(b"\n"):
                line = bytes(self._line)
                self._line.clear()
                if is_frame:
                    self._noise = 0
                    yield self._parse(line[len(MARK) :])

    def _skip(self, piece: bytes) -> None:
        self._noise += len(piece)
        self.noise_tail = (self.noise_tail + piece[-4096:])[-4096:]
        if self._noise > MAX_NOISE:
            raise BadAnswer(f"the host sent more than {MAX_NOISE >> 20} MiB that are no answer; it was refused")

    @staticmethod
    def _parse(body: bytes) -> tuple[str, dict[str, Any]]:
        if body.strip() == b"no-python3":
            raise Misconfigured(
                "there is no python3 (3.8 or newer) in the container",
                "install it there, e.g. `apt-get install python3` inside the container",
            )
        try:
            frame = json.loads(body)
            kind, value = frame["kind"], frame["value"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise BadAnswer("the container sent a malformed frame; it was refused", detail=repr(body[:200])) from error
        if kind not in KINDS or not isinstance(value, dict):
            raise BadAnswer("the container sent a frame of an unknown kind; it was refused", detail=repr(body[:200]))
        return kind, value


def _lines(data: bytes) -> Iterator[bytes]:
    """Cut at newlines only, keeping them."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end
