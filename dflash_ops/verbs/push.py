"""Brings data and models into the container: resumed where it broke off, verified by hash, in place only when whole."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document, Printable
from dflash_ops.errors import ConfigurationError, DflashError, Exit, UsageError
from dflash_ops.progress import Progress
from dflash_ops.remote.protocol import PushedFile, PushedUnit, PushRequest
from dflash_ops.text import counted
from dflash_ops.text import size as size_text
from dflash_ops.transport.base import BadAnswer, result_of
from dflash_ops.verbs.reconnect import lasting
from dflash_ops.verbs.session import Session, parsed

CHUNK = 256 * 1024
_LONGEST_NAME = 220  # bytes; with the ending that it has until it is whole, 255 are the limit of file systems
_MAX_FILES = 10_000
_DAMAGED = "the container answered for other files than it was asked about"


@dataclass(frozen=True)
class PushOptions:
    files: tuple[Path, ...]
    to: str | None = None  # a folder of the container; None: `data` below its root
    replace: bool = False
    keep_mode: bool = False


class Pushed(Document):
    """The answer of `dflash push`."""

    kind: Literal["push"] = "push"
    container: str
    folder: Printable
    files: tuple[Printable, ...] = Field(description="Those that are new there now, below `folder`")
    kept: tuple[Printable, ...] = Field(description="Those that were there already, with the same contents")
    sent: int = Field(description="Bytes that travelled, without those that had come before")


class _Looked(BaseModel):
    files: list[tuple[Literal["same", "differs", "missing"], int]]
    free: int
    where: Printable


class _Taken(BaseModel):
    wrong: list[Printable]


@dataclass(frozen=True)
class _File:
    """One file as it was when its hash was taken."""

    local: Path
    path: str  # below its unit; empty when it is the unit
    size: int
    sha256: str
    mode: int
    changed: int  # mtime in nanoseconds


@dataclass(frozen=True)
class _Unit:
    """A file or a folder that was named: what is put in place at once."""

    name: str
    is_folder: bool
    files: tuple[_File, ...]

    def described(self, keep_mode: bool) -> PushedUnit:
        """As `dflash_ops.remote.push` takes it."""
        whole = hashlib.sha256()
        for file in self.files:
            whole.update(f"{file.sha256} {file.size} {file.path}\n".encode())
        files: list[PushedFile] = [
            {
                "path": file.path,
                "size": file.size,
                "sha256": file.sha256,
                "executable": bool(file.mode & 0o100),
                "mode": file.mode if keep_mode else None,
            }
            for file in self.files
        ]
        return {"name": self.name, "folder": self.is_folder, "sha256": whole.hexdigest(), "files": files}

    def shown(self, file: _File) -> str:
        """Its path below the folder that it is pushed to."""
        return f"{self.name}/{file.path}" if file.path else self.name


def push(session: Session, options: PushOptions, progress: Progress) -> Pushed:
    """Bring files and folders into `options.to`.

    Raises UsageError for what cannot be sent and for what would replace something else, ConfigurationError when the
    disk there has no room or a file changes meanwhile, DflashError when a file differs from its hash twice.
    """
    to = options.to if options.to is not None else f"{session.root}/data"
    if not to.startswith("/") or ".." in to.split("/") or not to.isprintable():
        raise UsageError(f"{to!r} is no folder of a container", "give its whole path, such as --to /data")
    to = "/" + "/".join(part for part in to.split("/") if part not in ("", "."))
    units = _units(options.files, progress)
    sender = _Sender(session, to, units, options, progress)
    sender.look()
    if not options.keep_mode:
        _say_what_was_private(session, sender.pending())
    if sender.pending():
        session.so_far = "what came is kept there, and the same `dflash push` goes on from it"
        sender.send()
    return sender.answer()


# ---- what is here -----------------------------------------------------------------------------------------------


def _units(given: tuple[Path, ...], progress: Progress) -> list[_Unit]:
    found: dict[str, list[tuple[Path, str]]] = {}
    folders: dict[str, bool] = {}
    for path in given:
        name = path.name if path.name not in ("", "..") else path.resolve().name
        if not name:
            raise UsageError(f"{path} has no name that it could have in the container", "push what is in it")
        if name in found:
            raise UsageError(f"two of the files are named {name}", "push them one after the other, with another --to")
        folders[name] = path.is_dir()
        found[name] = list(_walk(path)) if folders[name] else [(path, "")]
    listed = [entry for entries in found.values() for entry in entries]
    if len(listed) > _MAX_FILES:
        raise UsageError(f"these are more than {_MAX_FILES} files", "push an archive of them, or a part at a time")
    for name, entries in found.items():
        if not entries:
            raise UsageError(f"there is no file in the folder {name}", "only files travel, and the folders they are in")
        for local, below in entries:
            _check_name(local, below or name)
    progress.total(sum(_status(local).st_size for local, _ in listed), 0)
    return [
        _Unit(name, folders[name], tuple(_file(local, path, progress) for local, path in entries))
        for name, entries in found.items()
    ]


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """All files below a folder in order, hidden ones too. A link to a file stands for the file."""

    def unreadable(error: OSError) -> None:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}", "correct its permissions")

    for here, folders, names in os.walk(folder, onerror=unreadable):
        folders.sort()
        for name in folders:
            if (Path(here) / name).is_symlink():
                raise UsageError(f"{Path(here) / name} is a link to a folder", "push that folder itself")
        for name in sorted(names):
            path = Path(here) / name
            yield path, path.relative_to(folder).as_posix()


def _check_name(local: Path, path: str) -> None:
    for part in path.split("/"):
        if not part.isprintable():  # neither is a name that is not UTF-8
            raise UsageError(f"the file name {part!r} has letters that cannot be shown", "rename it")
        if len(part.encode()) > _LONGEST_NAME:
            raise UsageError(f"the file name of {local} is longer than {_LONGEST_NAME} bytes", "rename it")


def _status(local: Path) -> os.stat_result:
    try:
        status = local.stat()
    except OSError as error:
        raise UsageError(f"cannot read {local}: {error.strerror}", "name files that are here") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{local} is neither a file nor a folder", "only these can be pushed")
    return status


def _file(local: Path, path: str, progress: Progress) -> _File:
    _status(local)  # opening a FIFO would wait for its writer
    progress.file(f"reading {path or local.name}")
    digest = hashlib.sha256()
    try:
        with local.open("rb") as stream:
            status = os.fstat(stream.fileno())
            size = 0
            while data := stream.read(CHUNK):
                digest.update(data)
                size += len(data)
                progress.advance(len(data))
    except OSError as error:
        raise UsageError(f"cannot read {local}: {error.strerror}", "correct its permissions") from error
    if size != status.st_size:
        raise _changed(local)
    return _File(local, path, size, digest.hexdigest(), stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime_ns)


def _contents(file: _File, start: int) -> Iterator[bytes]:
    left = file.size - start
    with file.local.open("rb") as stream:
        stream.seek(start)
        while left:
            data = stream.read(min(CHUNK, left))
            if not data:
                raise _changed(file.local)
            left -= len(data)
            yield data


def _changed(local: Path) -> ConfigurationError:
    return ConfigurationError(f"{local} changes while it is pushed", "push it when nothing writes it any more")


def _say_what_was_private(session: Session, pending: list[tuple[_Unit, _File]]) -> None:
    private = [unit.shown(file) for unit, file in pending if not file.mode & 0o077]
    if private:
        others = f" and {counted(len(private) - 1, 'other file')}" if len(private) > 1 else ""
        session.say(
            f"{private[0]}{others}: private here, there as readable as the folder; --keep-mode keeps the permissions"
        )


# ---- to the container -------------------------------------------------------------------------------------------


class _Sender:
    """What the container has, and what it is sent."""

    def __init__(self, session: Session, to: str, units: list[_Unit], options: PushOptions, progress: Progress) -> None:
        self._session = session
        self._to = to
        self._options = options
        self._progress = progress
        self._files = [(unit, file) for unit in units for file in unit.files]
        self._units = [unit.described(options.keep_mode) for unit in units]
        self._plan: list[tuple[str, int]] | None = None  # of the next connection
        self._payload_plan: list[tuple[_File, int]] = []  # of this connection
        self._kept: list[str] = []
        self._sent = 0
        self._at = 0  # bytes of the connection's payload that the container has

    def look(self) -> None:
        """Ask what is there. Raises UsageError for what would be replaced, ConfigurationError without room."""
        request: PushRequest = {"root": self._session.root, "do": "look", "to": self._to, "units": self._units}
        looked = parsed(_Looked, result_of(self._session.stream("push", request), lambda event: None))
        if len(looked.files) != len(self._files) or any(
            not 0 <= have <= file.size for (_, file), (_, have) in zip(self._files, looked.files, strict=True)
        ):
            raise BadAnswer(_DAMAGED)
        self._plan = list(looked.files)
        states = [(unit.shown(file), state) for (unit, file), (state, _) in zip(self._files, self._plan, strict=True)]
        other = [name for name, state in states if state == "differs"]
        if other and not self._options.replace:
            more = f" (and {counted(len(other) - 1, 'other file')})" if len(other) > 1 else ""
            raise UsageError(
                f"{self._to}/{other[0]}{more} is in the container already, with other contents",
                "--replace replaces it; --to names another folder",
            )
        self._kept = [name for name, state in states if state == "same"]
        total = sum(file.size for _, file in self._files)
        missing = sum(file.size - have for file, have in self._missing())
        if missing > looked.free:
            raise ConfigurationError(
                f"{size_text(missing)} are to come and {looked.where} of the container has room for "
                f"{size_text(looked.free)}",
                "free space there (`dflash gc` helps), or name another folder by --to",
            )
        self._progress.total(total, total - missing)

    def pending(self) -> list[tuple[_Unit, _File]]:
        """The files that are not in place."""
        assert self._plan is not None
        return [entry for entry, (state, _) in zip(self._files, self._plan, strict=True) if state != "same"]

    def _missing(self) -> list[tuple[_File, int]]:
        """Files that are not in place, and how much of each came before."""
        assert self._plan is not None
        pairs = zip(self._files, self._plan, strict=True)
        return [(file, have) for (_, file), (state, have) in pairs if state != "same"]

    def send(self) -> None:
        """Send what is missing, over as many connections as it takes."""
        for attempt in (1, 2):
            wrong = self._attempt()
            if not wrong:
                return
            self._check_unchanged()
            if attempt == 2:
                raise DflashError(Exit.TEMPORARY, f"{wrong[0]} does not match its hash", "push again")
            self._session.say(f"{wrong[0]} does not match its hash: sent anew")

    def _attempt(self) -> list[str]:
        kept = "what came is kept; Ctrl-C stops"
        frames = lasting(self._session, "push", self._request, payload=self._payload, meanwhile=kept)
        return parsed(_Taken, result_of(frames, lambda event: self._advance(event.value))).wrong

    def _request(self) -> PushRequest:
        if self._plan is None:
            kept = self._kept
            self.look()
            self._kept = kept  # what was put in place by the connection before is ours
        assert self._plan is not None
        request: PushRequest = {
            "root": self._session.root,
            "do": "take",
            "to": self._to,
            "units": self._units,
            "plan": [(state, have) for state, have in self._plan],
        }
        self._at = 0
        self._payload_plan, self._plan = self._missing(), None
        return request

    def _payload(self) -> Iterator[bytes]:
        for file, have in self._payload_plan:
            self._progress.file(file.path or file.local.name)
            try:
                yield from _contents(file, have)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot read {file.local} any more: {error.strerror}", "push again"
                ) from error

    def _advance(self, event: dict[str, Any]) -> None:
        at = event.get("at")
        if type(at) is not int or at < self._at or at > sum(file.size - have for file, have in self._payload_plan):
            raise BadAnswer(_DAMAGED)
        self._sent += at - self._at
        self._progress.advance(at - self._at)
        self._at = at

    def _check_unchanged(self) -> None:
        for _, file in self._files:
            status = _status(file.local)
            if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
                raise _changed(file.local)

    def answer(self) -> Pushed:
        """What is there now."""
        names = [unit.shown(file) for unit, file in self._files]
        return Pushed(
            container=self._session.container_name,
            folder=self._to,
            files=tuple(name for name in names if name not in self._kept),
            kept=tuple(self._kept),
            sent=self._sent,
        )
