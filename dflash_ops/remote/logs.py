"""Sends a run's log from a given byte on, each piece with its (inode, offset): none is lost or repeated.

The cursor is the laptop's: after a broken connection it asks again from the last byte that it got. No `tail -f` is
left behind, and no inotify is used: it misses renames on overlay file systems.
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import os
import re
import stat
import time
import zlib
from typing import BinaryIO, Optional, Tuple

from dflash_ops.remote import files, status, which
from dflash_ops.remote.channel import Channel
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import Cursor, LogsRequest, Snapshot

CHUNK = 256 * 1024
REWRITTEN = "the log was truncated and written anew; it is shown from its beginning"
_POLL = 0.25  # seconds between looks at the file
_UNIT_EVERY = 3.0  # seconds between questions to systemd
_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?Z")


def main(request: LogsRequest, channel: Channel) -> Snapshot:
    """Send the log.

    request: `root`, `run`; `cursor` or null to begin; then `lines` (null: all) and `since` (unix seconds; negative:
    seconds ago; null) say where; `follow` until the run's end, or only what is there.
    Events: {run}; {at: {inode, offset}} whenever the position is set; {size, before} with as many bytes from there on,
    as zlib data, and the hash for the cursor behind them; {notice} before the position jumps; {caught_up}.
    Result: the probe's snapshot, without the GPUs.
    """
    paths = which.find_run(request["root"], request.get("run"))
    channel.event(run=paths.run)
    reader = _Reader(paths, channel)
    reader.open(request.get("cursor"), request.get("lines"), request.get("since"))
    reader.drain()
    channel.event(caught_up=True)
    if request["follow"]:
        _follow(paths, reader, channel)
    return status.snapshot(paths, {"gpu": False, "lines": 200, "root": request["root"]})


def _follow(paths: RunPaths, reader: _Reader, channel: Channel) -> None:
    asked = 0.0
    while True:
        now = time.monotonic()
        if now - asked >= _UNIT_EVERY or os.path.exists(paths.exit):
            asked = now
            if status.over(status.state(paths)):
                break
        channel.pause(_POLL)
        reader.look()
    reader.look()  # the unit is gone, so nobody writes any more: this is the rest


class _Reader:
    """An open log and how far it was sent."""

    def __init__(self, paths: RunPaths, channel: Channel) -> None:
        self._paths = paths
        self._channel = channel
        self._stream: Optional[BinaryIO] = None
        self._inode = 0
        self._offset = 0
        self._before = ""  # hash of the bytes before the offset
        self._told_gone = False

    def open(self, cursor: Optional[Cursor], lines: Optional[int], since: Optional[float]) -> None:
        """Take up a cursor, or find the place where `lines` and `since` begin."""
        if cursor is not None:
            stream = self._find(cursor["inode"])
            if stream is not None:
                before = cursor.get("before")
                if before is not None and before != bytes_before(stream, cursor["offset"]):
                    self._notice(REWRITTEN)
                    self._use(stream, 0)
                else:
                    self._use(stream, cursor["offset"])
                return
        stream = self._open_path()
        if stream is None:
            return
        if cursor is not None:
            self._notice("the log that was followed is gone; another one stands in its place")
            self._use(stream, 0)
            return
        size = os.fstat(stream.fileno()).st_size
        begin = 0 if lines is None else start_of_last_lines(stream, size, lines)
        if since is not None:
            begin = max(begin, start_since(stream, size, since if since >= 0 else time.time() + since))
        self._use(stream, begin)

    def look(self) -> None:
        """Send what came, and notice truncation, rotation and deletion."""
        self.drain()
        try:
            found: Optional[os.stat_result] = os.stat(self._paths.log)
        except OSError:
            found = None
        if found is None:
            # The unit still writes into the deleted file, and our open handle still reads it.
            if self._stream is not None and not self._told_gone:
                self._notice("the log was deleted; what the run still writes is shown as long as this goes on")
                self._told_gone = True
        elif self._stream is None or found.st_ino != self._inode:
            stream = self._open_path()
            if stream is not None:
                if self._stream is not None:
                    self.drain()
                    self._notice("the log was replaced by a new file, which is shown from its beginning")
                self._use(stream, 0)
                self.drain()

    def drain(self) -> None:
        """Send everything up to the end of the file."""
        if self._stream is None:
            return
        size = os.fstat(self._stream.fileno()).st_size
        # One that was truncated and has grown past our place since then shows it only by what stands before the place.
        if size < self._offset or (size > self._offset and self._before != bytes_before(self._stream, self._offset)):
            self._notice(REWRITTEN)
            self._offset = 0
            self._tell()
        while True:
            data = os.pread(self._stream.fileno(), CHUNK, self._offset)
            if not data:
                return
            self._offset += len(data)
            self._before = bytes_before(self._stream, self._offset)
            self._channel.event(zlib.compress(data, 1), size=len(data), before=self._before)

    def _notice(self, text: str) -> None:
        self._channel.event(notice=text)

    def _use(self, stream: BinaryIO, offset: int) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._inode, self._offset = stream, os.fstat(stream.fileno()).st_ino, offset
        self._told_gone = False
        self._tell()

    def _tell(self) -> None:
        assert self._stream is not None
        self._before = bytes_before(self._stream, self._offset)
        self._channel.event(at={"inode": self._inode, "offset": self._offset})

    def _open_path(self) -> Optional[BinaryIO]:
        try:
            if not stat.S_ISREG(os.stat(self._paths.log).st_mode):  # opening a FIFO would wait for a writer
                return None
            return open(self._paths.log, "rb", buffering=0)
        except OSError:
            return None

    def _find(self, inode: int) -> Optional[BinaryIO]:
        """The file with this inode: at its path, under another name beside it, or still open in the trainer."""
        places = [self._paths.log]
        with contextlib.suppress(OSError):
            places += [entry.path for entry in os.scandir(self._paths.directory) if entry.inode() == inode]
        started = files.read_json(self._paths.started) or {}
        places.append("/proc/%s/fd/1" % started.get("main_pid"))
        for place in places:
            with contextlib.suppress(OSError):
                if os.stat(place).st_ino == inode:
                    return open(place, "rb", buffering=0)
        return None


def bytes_before(stream: BinaryIO, offset: int) -> str:
    """A hash of up to 256 bytes before a place: the same file at the same place has the same ones for ever."""
    length = min(256, offset)
    return hashlib.sha256(os.pread(stream.fileno(), length, offset - length)).hexdigest()[:16]


def start_of_last_lines(stream: BinaryIO, size: int, lines: int) -> int:
    """The offset at which the last `lines` lines begin; an unfinished last line counts as one."""
    if lines == 0:
        return size
    end, found, first = size, 0, True
    while end > 0:
        begin = max(0, end - CHUNK)
        block = os.pread(stream.fileno(), end - begin, begin)
        if first:
            first = False
            if block.endswith(b"\n"):  # ends the last line, begins none
                block = block[:-1]
        position = len(block)
        while True:
            position = block.rfind(b"\n", 0, position)
            if position < 0:
                break
            found += 1
            if found == lines:
                return begin + position + 1
        end = begin
    return 0


def start_since(stream: BinaryIO, size: int, moment: float) -> int:
    """The offset of the first line stamped at `moment` or later, by bisection; `size` when there is none.

    Lines without a stamp (tracebacks) belong to the stamped line before them.
    """
    with os.fdopen(os.dup(stream.fileno()), "rb") as buffered:
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            line = _stamped_after(buffered, middle, size)
            if line is not None and line[1] < moment:
                low = line[0] + 1
            else:
                high = middle
        line = _stamped_after(buffered, low, size)
        return size if line is None else line[0]


def _stamped_after(stream: BinaryIO, offset: int, end: int) -> Optional[Tuple[int, float]]:
    """Offset and time of the first stamped line that begins at or after `offset` and before `end`."""
    stream.seek(max(0, offset - 1))
    if offset:
        stream.readline()
    position = stream.tell()
    while position < end:
        line = stream.readline(4 * CHUNK)
        match = _STAMP.match(line)
        if match:
            whole = calendar.timegm(tuple(int(part) for part in match.groups()[:6]) + (0, 0, 0))
            return position, whole + float(b"0." + (match.group(7) or b"0"))
        if not line:
            break
        position += len(line)
    return None
