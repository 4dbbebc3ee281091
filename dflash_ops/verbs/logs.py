"""Follows a run's log over as many connections as it takes; loses and repeats no byte."""

from __future__ import annotations

import re
import shutil
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any, TextIO

from dflash_ops.errors import UsageError
from dflash_ops.remote.lines import last_segment
from dflash_ops.remote.protocol import Cursor, LogsRequest
from dflash_ops.run.record import check_run_name
from dflash_ops.run.status import Status
from dflash_ops.text import decoded, fitted, is_dumb, visible
from dflash_ops.transport.base import BadAnswer, result_of
from dflash_ops.verbs.reconnect import lasting
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import describe

_LARGEST_PIECE = 4 * 1024 * 1024  # of one frame, unpacked: a hostile remote must not fill our memory
_LONGEST_LINE = 1024 * 1024  # a longer one is shown in pieces
_NULS = re.compile(rb"\0{16,}")
_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"


@dataclass(frozen=True)
class TailOptions:
    """What to show. `lines` None: all; `since` as `parse_since` gives it."""

    run: str | None = None
    lines: int | None = None
    follow: bool = True
    since: float | None = None
    grep: re.Pattern[str] | None = None


def parse_since(text: str) -> float:
    """`90s`, `10m`, `2h`, `1d` as negative seconds, or an RFC 3339 moment as unix seconds. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if match:
        return -float(int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]])
    from datetime import UTC, datetime

    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since {text!r} is no time", "write 10m, 2h, 1d or 2026-11-30T07:20:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def parse_grep(text: str) -> re.Pattern[str]:
    """A regular expression. Raises UsageError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"--grep {text!r} is no regular expression: {error}", r"escape special characters with \ "
        ) from None


class Folder:
    """Bytes in, printable text out: progress bars folded, control characters spelled out, other bytes as they are.

    A progress bar draws itself anew after each `\\r`; of such a line only the last state is kept.
    """

    def __init__(self, grep: re.Pattern[str] | None = None) -> None:
        self._grep = grep
        self._rest = b""

    def feed(self, data: bytes) -> str:
        """The lines that `data` completes, each with its newline."""
        block, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._rest += data
            return self._relieve() if len(self._rest) > _LONGEST_LINE else ""
        block, self._rest = self._rest + block, rest
        # The usual case, at the speed of memory: nothing to fold, to spell out or to choose from.
        if self._grep is None and not block.translate(None, _PLAIN):
            return block.decode("ascii") + "\n"
        return self._kept([_shown(line) for line in block.split(b"\n")])

    def partial(self) -> str:
        """The unfinished last line, as far as it came."""
        return _shown(self._rest)

    def finish(self) -> str:
        """What is left at the end of the log: a last line without newline."""
        rest, self._rest = self._rest, b""
        return self._kept([_shown(rest)]) if rest else ""

    def _relieve(self) -> str:
        """Make room when a line does not end: forget a progress bar's past, or show what there is of a giant line."""
        bare = self._rest.rstrip(b"\r")
        if b"\r" in self._rest:
            self._rest = bare.rpartition(b"\r")[2] + (b"\r" if len(bare) < len(self._rest) else b"")
            return ""
        cut = len(self._rest)
        while cut and self._rest[cut - 1] & 0xC0 == 0x80:  # inside a character of UTF-8
            cut -= 1
        cut = max(cut - 1, len(self._rest) - 4)
        piece, self._rest = self._rest[:cut], self._rest[cut:]
        return _shown(piece) if self._grep is None else self._kept([_shown(piece)])

    def _kept(self, lines: list[str]) -> str:
        kept = lines if self._grep is None else [line for line in lines if self._grep.search(line)]
        return "".join(line + "\n" for line in kept)


def _shown(line: bytes) -> str:
    # A file that was truncated under its writer has a hole there, megabytes of NULs long.
    line = _NULS.sub(lambda hole: f"[{len(hole[0])} NUL bytes]".encode(), line)
    return visible(last_segment(decoded(line)))


class _Screen:
    """Where the text goes: lines are written once; on a terminal that can, an unfinished one is redrawn in place."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty() and not is_dumb()
        self._drawn = False

    def write(self, text: str) -> None:
        if text:
            self.clear()
            self._out.write(text)

    def draw(self, partial: str) -> None:
        """Show an unfinished line until the next call of anything."""
        if self._terminal and (partial or self._drawn):
            self.clear()
            # A row that wrapped would leave a part of itself behind when it is cleared.
            self._out.write(fitted(partial, shutil.get_terminal_size().columns - 1))
            self._drawn = bool(partial)
        self._out.flush()

    def clear(self) -> None:
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._drawn = False


def tail(session: Session, options: TailOptions, out: TextIO) -> Status:
    """Write the log to `out`; with `follow`, until the run's end. Returns the run's status at that moment.

    What is not log (notices, reconnections) is said on stderr. Raises RemoteRefusal when there is no such run.
    """
    if options.run is not None:
        check_run_name(options.run)
    view = _View(session, options, _Screen(out))
    value = result_of(lasting(session, "logs", view.request), lambda frame: view.take(frame.value))
    view.end()
    return describe(session, value)


class _View:
    """How far we are: the run that was chosen, and the next byte that is wanted."""

    def __init__(self, session: Session, options: TailOptions, screen: _Screen) -> None:
        self._session = session
        self._options = options
        self._screen = screen
        self._run = options.run
        self._cursor: tuple[int, int] | None = None
        self._before: str | None = None  # the hash of what stands before it
        self._begun = False  # the place where `lines` and `since` begin was found
        self._jump = True  # the next position need not follow from the last one
        self._folder = Folder(options.grep)
        # With --grep, -n counts matches; only reading up to the present tells which are the last ones.
        wanted = options.lines if options.grep is not None else None
        self._held: deque[str] | None = None if wanted is None else deque(maxlen=wanted)

    def request(self) -> LogsRequest:
        """What to ask for on the next connection."""
        cursor: Cursor | None = None
        if self._cursor is not None:
            cursor = {"inode": self._cursor[0], "offset": self._cursor[1], "before": self._before}
        first = not self._begun
        return {
            "root": self._session.root,
            "run": self._run,
            "cursor": cursor,
            "lines": self._options.lines if first and self._options.grep is None else None,
            "since": self._options.since if first else None,
            "follow": self._options.follow,
        }

    def take(self, event: dict[str, Any]) -> None:
        """One event of the remote program. Raises BadAnswer when bytes are missing or come twice."""
        match event:
            case {"run": str(run)}:
                self._run = run
            case {"notice": str(text)}:
                self._flush()
                self._screen.clear()
                self._session.say(f"-- {visible(text, 200)}")
                self._jump = True
            case {"at": {"inode": int(inode), "offset": int(offset)}}:
                if not self._jump and self._cursor not in (None, (inode, offset)):
                    raise BadAnswer("the log came out of order; nothing more of it is shown", "run the command again")
                self._cursor, self._jump, self._begun = (inode, offset), False, True
                self._before = None
            case {"data": bytes(data), "size": int(size)} if self._cursor is not None:
                self._show(self._folder.feed(_unpacked(data, size)))
                self._cursor = (self._cursor[0], self._cursor[1] + size)
                self._before = event.get("before") if isinstance(event.get("before"), str) else None
                self._screen.draw(self._folder.partial() if self._held is None else "")
            case {"caught_up": True}:
                self._begun = True
                if self._held is not None:
                    held, self._held = self._held, None
                    self._show("".join(held))
                self._screen.draw(self._folder.partial())
            case _:
                raise BadAnswer("the log came in a form that this dflash does not know")

    def end(self) -> None:
        """The stream is over: show what waits."""
        self._flush()
        self._screen.draw("")

    def _flush(self) -> None:
        self._show(self._folder.finish())

    def _show(self, text: str) -> None:
        if self._held is None:
            self._screen.write(text)
        else:
            self._held.extend(line + "\n" for line in text.split("\n")[:-1])


def _unpacked(data: bytes, size: int) -> bytes:
    """The bytes of an event. Raises BadAnswer when they are not what was announced."""
    try:
        unpacker = zlib.decompressobj()
        found = unpacker.decompress(data, _LARGEST_PIECE)
    except zlib.error as error:
        raise BadAnswer("a piece of the log came damaged", "run the command again") from error
    if len(found) != size or not unpacker.eof:
        raise BadAnswer("a piece of the log came damaged", "run the command again")
    return found
