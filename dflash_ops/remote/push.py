"""Takes files into a folder of the container: resumed where it broke off, verified by hash, in place only when whole.

What has come of a file or folder stands beside its place as `<name>.<16 digits of its hash>.partial`, so what is there
is always the beginning of the same contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from typing import Any, Iterator, List, Optional, Tuple, Union

from dflash_ops.remote.channel import Channel, PeerGone, Refusal
from dflash_ops.remote.files import checked_root, fsync_directory
from dflash_ops.remote.protocol import (
    TEMPORARY,
    USAGE,
    LookedAnswer,
    PushedFile,
    PushedUnit,
    PushRequest,
    TakenAnswer,
)

CHUNK = 512 * 1024
_SYNCED_EVERY = 64 * 1024 * 1024  # so that the last fsync does not take minutes
_TOLD_EVERY = 1 << 20
_LOCK_SECONDS = 45.0  # longer than a program waits for bytes of a connection that was cut unseen
# Below the root these hold what dflash itself keeps and never changes.
_OWN = ("runs", "releases", "env", "wheels")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def main(request: PushRequest, channel: Channel) -> Union[LookedAnswer, TakenAnswer]:
    """Look what is there, or take what is missing. Events of take: {at: bytes of the payload so far}."""
    to = _checked(request["root"], request["to"])
    units = [_Unit(to, described) for described in request["units"]]
    for unit in units:
        _checked(request["root"], unit.final)
    if request["do"] == "look":
        return _look(to, units, channel)
    return {"wrong": _take(to, units, [(state, have) for state, have in request["plan"]], channel)}


def _checked(root: str, to: str) -> str:
    parts = to.split("/")
    if not to.startswith("/") or ".." in parts or "\0" in to:
        raise Refusal(USAGE, "%r is no folder of a container" % to, "give its whole path, such as /data")
    path = "/" + os.path.normpath(to).lstrip("/")  # two slashes at the beginning stay two
    for name in _OWN:
        own = os.path.join(checked_root(root), name)
        if any((each + "/").startswith(own + "/") for each in (path, os.path.realpath(path))):
            raise Refusal(USAGE, "%s is dflash's own" % own, "name another folder by --to")
    return path


class _Unit:
    """A file, or a folder with all that is in it: what is put in place at once."""

    def __init__(self, to: str, described: PushedUnit) -> None:
        self.name = str(described["name"])
        self.is_folder = bool(described["folder"])
        self.files = described["files"]
        digest = str(described["sha256"])
        paths = [str(file["path"]) for file in self.files] if self.is_folder else []
        parts = [self.name] + [part for path in paths for part in path.split("/")]
        if not _DIGEST.match(digest) or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise Refusal(USAGE, "nothing can be stored under the name %r" % self.name)
        if "/" in self.name or (not self.is_folder and len(self.files) != 1):
            raise Refusal(USAGE, "nothing can be stored under the name %r" % self.name)
        self.parent = to
        self.final = os.path.join(to, self.name)
        self.partial = "%s.%s.partial" % (self.final, digest[:16])

    def place(self, file: PushedFile) -> str:
        """Where a file is to be."""
        return os.path.join(self.final, file["path"]) if self.is_folder else self.final

    def waiting(self, file: PushedFile) -> str:
        """Where it is until its unit is whole."""
        return os.path.join(self.partial, file["path"]) if self.is_folder else self.partial


# ---- look -------------------------------------------------------------------------------------------------------


def _look(to: str, units: List[_Unit], channel: Channel) -> LookedAnswer:
    where = _existing(to)
    if not os.path.isdir(where):
        raise Refusal(USAGE, "%s is not a folder" % where, "name another one by --to")
    found: List[Tuple[str, int]] = []
    for unit in units:
        if os.path.lexists(unit.final) and os.path.isdir(unit.final) != unit.is_folder:
            kinds = ("a folder", "a file") if os.path.isdir(unit.final) else ("a file", "a folder")
            raise Refusal(USAGE, "%s is %s there and %s here" % (unit.final, *kinds), "name another folder by --to")
        for file in unit.files:
            found.append((_state(unit.place(file), file, channel), _came_before(unit.waiting(file), file["size"])))
    usage = os.statvfs(where)
    return {"files": found, "free": usage.f_bavail * usage.f_frsize, "where": where}


def _existing(path: str) -> str:
    """The path itself, or what of it exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _state(place: str, file: PushedFile, channel: Channel) -> str:
    if not os.path.lexists(place):
        return "missing"
    if not os.path.isfile(place) or os.path.getsize(place) != file["size"]:
        return "differs"
    with open(place, "rb") as stream:
        digest = _read_on(stream, file["size"], channel)
    return "same" if digest.hexdigest() == file["sha256"] else "differs"


def _came_before(waiting: str, size: int) -> int:
    try:
        came = os.lstat(waiting).st_size
    except OSError:
        return 0
    return came if came <= size else 0


def _read_on(stream: Any, size: int, channel: Channel) -> Any:
    """The hash over the next `size` bytes; fewer when the file ends before."""
    digest = hashlib.sha256()
    while size:
        data = stream.read(min(CHUNK, size))
        if not data:
            break
        digest.update(data)
        size -= len(data)
        channel.beat()
    return digest


# ---- take -------------------------------------------------------------------------------------------------------


class _Meter:
    """Tells how much has come: each megabyte, and each second."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._at = self._told = 0
        self._when = time.monotonic()

    def add(self, count: int) -> None:
        self._at += count
        if self._at - self._told >= _TOLD_EVERY or time.monotonic() - self._when >= 1:
            self.tell()

    def tell(self) -> None:
        self._told, self._when = self._at, time.monotonic()
        self._channel.event(at=self._at)


def _take(to: str, units: List[_Unit], plan: List[Tuple[str, int]], channel: Channel) -> List[str]:
    files = [(unit, file) for unit in units for file in unit.files]
    if len(plan) != len(files):
        raise Refusal(USAGE, "the plan is of other files")
    if any(state != "same" and have < file["size"] for (_, file), (state, have) in zip(files, plan)):
        channel.receive(0)  # who sends nothing takes no lock
    wrong: List[str] = []
    meter = _Meter(channel)
    meter.tell()
    for unit in units:
        wanted, plan = list(zip(unit.files, plan)), plan[len(unit.files) :]
        missing = [(file, have) for file, (state, have) in wanted if state != "same"]
        if missing:
            _make_folder(to)
            with _claimed(unit, channel):
                failed = [file for file, have in missing if not _receive(unit, file, have, channel, meter)]
                wrong += [unit.place(file) for file in failed]
                if not failed:
                    _put_in_place(unit, [file for file, _ in missing])
    meter.tell()
    return wrong


@contextlib.contextmanager
def _claimed(unit: _Unit, channel: Channel) -> Iterator[None]:
    """No other push writes the unit meanwhile."""
    if unit.is_folder:
        with contextlib.suppress(FileExistsError):
            os.mkdir(unit.partial, 0o700)
        handle = os.open(unit.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    else:
        handle = os.open(unit.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while not _locked(handle):
            if time.monotonic() > end:
                raise Refusal(TEMPORARY, "another push writes %s" % unit.final, "wait for its end", "lock")
            channel.beat()
            time.sleep(0.1)
        if not _is_at(handle, unit.partial):
            raise Refusal(TEMPORARY, "another push has ended and put %s in place" % unit.final, "push again", "lock")
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(handle: int, path: str) -> bool:
    mine = os.fstat(handle)
    with contextlib.suppress(OSError):
        there = os.lstat(path)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    return False


def _receive(unit: _Unit, file: PushedFile, have: int, channel: Channel, meter: _Meter) -> bool:
    """The rest of one file, durable. False when the whole does not match its hash: it is removed."""
    path = unit.waiting(file)
    if unit.is_folder:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "r+b") as stream:
        digest = _read_on(stream, have, channel)
        if stream.tell() != have:
            raise Refusal(TEMPORARY, "%s was changed by somebody else" % path, "push again", "changed")
        stream.truncate()
        left, unsynced = file["size"] - have, 0
        while left:
            data = channel.receive(min(CHUNK, left))
            if not data:
                raise PeerGone()
            stream.write(data)
            digest.update(data)
            left -= len(data)
            unsynced += len(data)
            if unsynced >= _SYNCED_EVERY:
                stream.flush()
                os.fdatasync(handle)
                unsynced = 0
            meter.add(len(data))
        if digest.hexdigest() != file["sha256"]:
            os.unlink(path)
            return False
        stream.flush()
        os.fchmod(handle, _mode(file, _folder_mode(os.path.dirname(unit.place(file)))))
        os.fsync(handle)
    return True


def _mode(file: PushedFile, folder: int) -> int:
    """Readable by whoever may list its folder, unless another mode was asked for."""
    if file["mode"] is not None:
        return int(file["mode"]) & 0o777
    return 0o600 | (folder & 0o044) | (folder & 0o111 if file["executable"] else 0)


def _folder_mode(path: str) -> int:
    """The mode of a folder, or of the one that it will be made in; nobody but the owner may write."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return os.stat(path).st_mode & 0o755 | 0o700


def _make_folder(path: str) -> None:
    """With all above it, each with the mode of the one that it is in, whatever the umask."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        _make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, _folder_mode(parent))
        fsync_directory(parent)


# ---- put in place -----------------------------------------------------------------------------------------------


def _put_in_place(unit: _Unit, came: List[PushedFile]) -> None:
    """By one rename; into a folder that is there, by one for each file that is new in it."""
    if unit.is_folder and os.path.isdir(unit.final):
        for file in came:
            _make_folder(os.path.dirname(unit.place(file)))
            os.replace(unit.waiting(file), unit.place(file))
            fsync_directory(os.path.dirname(unit.place(file)))
        shutil.rmtree(unit.partial, ignore_errors=True)
    else:
        if unit.is_folder:
            for here, _, _ in os.walk(unit.partial):
                os.chmod(here, _folder_mode(unit.parent))
                fsync_directory(here)
        os.replace(unit.partial, unit.final)
    fsync_directory(unit.parent)
    _forget_older(unit)


def _forget_older(unit: _Unit) -> None:
    """What came of other contents under the same name, whose push was given up."""
    older = re.compile(re.escape(unit.name) + r"\.[0-9a-f]{16}\.partial\Z")
    for name in os.listdir(unit.parent):
        if older.match(name):
            _remove_unless_claimed(os.path.join(unit.parent, name))


def _remove_unless_claimed(path: str) -> None:
    handle: Optional[int] = None
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if _locked(handle):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    if handle is not None:
        os.close(handle)
