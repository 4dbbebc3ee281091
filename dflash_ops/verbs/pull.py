"""Brings a run's files to the laptop: resumes, verifies by hash, puts in place only what is whole.

A file is written to `<name>.partial`, a checkpoint to `<name>.partial/`, and renamed when its last byte was verified.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field

from dflash_ops.document import Document
from dflash_ops.errors import ConfigurationError, DflashError, Exit
from dflash_ops.progress import Progress
from dflash_ops.remote.files import fsync_directory
from dflash_ops.remote.protocol import PullRequest
from dflash_ops.run.record import check_run_name
from dflash_ops.text import size as size_text
from dflash_ops.text import visible
from dflash_ops.transport.base import BadAnswer
from dflash_ops.verbs.reconnect import lasting
from dflash_ops.verbs.session import Session

What = Literal["checkpoints", "metrics", "log", "all", "report"]
PARTIAL = ".partial"
_LARGEST_PIECE = 4 * 1024 * 1024
# A remote path becomes a local one: nothing that could leave the folder, hide, or upset a terminal.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,200}\Z")
_DAMAGED = "the container sent a file that is not what it announced"


@dataclass(frozen=True)
class PullOptions:
    run: str | None
    what: What = "checkpoints"
    to: Path = Path()


class Pulled(Document):
    """The answer of `dflash pull`."""

    kind: Literal["pull"] = "pull"
    run: str
    folder: str
    files: tuple[str, ...] = Field(description="Those that are new or newer now, below `folder`")
    received: int = Field(description="Bytes that travelled, without those that were already here")
    kept: tuple[str, ...] = Field(description="Checkpoints that were already here in whole")
    vanished: tuple[str, ...] = Field(description="Checkpoints that the trainer deleted while they were pulled")
    refused: tuple[str, ...] = Field(description="Files left out: their names are not safe to take over")


def pull(session: Session, options: PullOptions, progress: Progress) -> Pulled:
    """Bring files of a run to `options.to`/<run>/.

    Raises RemoteRefusal when there is nothing to bring, ConfigurationError when the disk here has no room or holds
    something else under a name, DflashError when a file differs from its hash twice.
    """
    if options.run is not None:
        check_run_name(options.run)
    taker = _Taker(session.root, options, progress)
    session.so_far = "what came is kept, and the same `dflash pull` goes on from there"
    try:
        return _pulled(session, taker)
    except OSError as error:  # of this machine's files: the connection's own are DflashErrors
        where = error.filename or options.to
        raise ConfigurationError(
            f"cannot keep files here: {error.strerror or error} ({where})",
            "name another folder by --to",
        ) from error


def _pulled(session: Session, taker: _Taker) -> Pulled:
    for attempt in (1, 2):
        for frame in lasting(session, "pull", taker.request):
            if frame.kind == "event":
                taker.take(frame.value)
        if not taker.wrong:
            break
        if attempt == 2:
            raise DflashError(Exit.TEMPORARY, f"{taker.wrong[0]} does not match its hash", "pull again")
        session.say(f"{taker.wrong[0]} does not match its hash: fetched anew")
        taker.begin_anew()
    return taker.finish()


class _Taker:
    """What has come, and where the next bytes go."""

    def __init__(self, root: str, options: PullOptions, progress: Progress) -> None:
        self._root = root
        self._options = options
        self._progress = progress
        self.run = options.run
        self.wrong: list[str] = []
        self._plan: dict[str, int] = {}
        self._stream: BinaryIO | None = None
        self._path = ""
        self._done: dict[str, None] = {}
        self._kept: list[str] = []
        self._vanished: dict[str, None] = {}
        self._refused: list[str] = []  # as the container wrote them
        self._anew: set[str] = set()  # what is here of these is worth nothing
        self._received = 0

    def begin_anew(self) -> None:
        """Ask for the wrong ones once more, from their first byte."""
        self._anew.update(self.wrong)
        self.wrong.clear()

    @property
    def _folder(self) -> Path:
        assert self.run is not None  # the first event names it
        return self._options.to / self.run

    def request(self) -> PullRequest:
        """Ask for what is not here yet."""
        self._close()
        return {
            "root": self._root,
            "run": self.run,
            "what": self._options.what,
            "have": self._have(),
            "kept": self._whole(),
        }

    def _have(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self.run is None:
            return found
        for path in self._folder.rglob("*"):
            if path.is_file():
                name = self._name(path)
                if name not in self._anew:
                    found[name] = max(found.get(name, 0), path.stat().st_size)
        return found

    def _name(self, path: Path) -> str:
        parts = (part.removesuffix(PARTIAL) for part in path.relative_to(self._folder).parts)
        return "/".join(parts)

    def _whole(self) -> dict[str, str]:
        """Checkpoints that are here in whole, by the hash of their manifest."""
        if self.run is None:
            return {}
        manifests = (self._folder / "checkpoints").glob("*/manifest.json")
        return {
            path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in manifests
            if not path.parent.name.endswith(PARTIAL)
        }

    def take(self, event: dict[str, Any]) -> None:
        """One event of the remote program. Raises BadAnswer for what is not in its plan."""
        match event:
            case {"run": str(run)}:
                self.run = check_run_name(run)
                self._folder.mkdir(parents=True, exist_ok=True)
            case {"plan": list(plan), "kept": list(kept)}:
                self._begin(plan, kept)
            case {"begin": str(path), "offset": int(offset)} if path in self._plan:
                self._open(path, offset)
            case {"begin": str(path)} | {"vanished": str(path)} | {"end": str(path)} if path in self._refused:
                self._close()
            case {"data": bytes()} if self._stream is None and self._refused:
                pass
            case {"data": bytes(data), "size": int(size), "packed": bool(packed)} if self._stream is not None:
                piece = _unpacked(data, size, packed)
                if self._stream.tell() + size > self._plan[self._path]:
                    raise BadAnswer(_DAMAGED)
                self._stream.write(piece)
                self._received += size
                self._progress.advance(size)
            case {"end": str(path), "sha256": str(digest)} if path == self._path and self._stream is not None:
                self._end(digest)
            case {"vanished": str(path)} if path in self._plan:
                self._close()
                if _unit_of(path):
                    self._vanished[_unit_of(path)] = None
            case _:
                raise BadAnswer(_DAMAGED)

    def _begin(self, plan: list[Any], kept: list[Any]) -> None:
        self._plan, self._refused = {}, []
        for entry in plan:
            match entry:
                case [str(path), int(size)] if size >= 0 and all(_PART.match(part) for part in path.split("/")):
                    self._plan[path] = size
                case [str(path), int()]:
                    self._refused.append(path)
                case _:
                    raise BadAnswer(_DAMAGED)
        self._kept = [str(name) for name in kept if _PART.match(str(name))]
        here = self._have()
        done = sum(min(size, here.get(path, 0)) for path, size in self._plan.items())
        needed = sum(self._plan.values()) - done
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise ConfigurationError(
                f"{size_text(needed)} are to come and {self._folder} has room for {size_text(free)}",
                "free space, or name another folder by --to",
            )
        for unit in {_unit_of(path) for path in self._plan}:
            if unit and (self._folder / unit).exists():
                raise ConfigurationError(
                    f"{self._folder / unit} is here already and differs from the run's", "move it away, or use --to"
                )
        self._progress.total(sum(self._plan.values()), done)

    def _place(self, path: str) -> Path:
        """Where a file stands until it, or its checkpoint, is whole."""
        unit = _unit_of(path)
        if unit:
            return self._folder / f"{unit}{PARTIAL}" / path[len(unit) + 1 :]
        return self._folder / f"{path}{PARTIAL}"

    def _open(self, path: str, offset: int) -> None:
        self._close()
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        final = self._folder / path
        if not place.exists() and final.exists():
            shutil.copyfile(final, place)  # a log or metrics that grew: go on from what was pulled before
        place.touch()
        stream = place.open("r+b")
        self._stream, self._path = stream, path
        if not 0 <= offset <= stream.seek(0, os.SEEK_END):
            raise BadAnswer(_DAMAGED)
        stream.truncate(offset)
        stream.seek(offset)
        self._progress.file(path)

    def _end(self, digest: str) -> None:
        assert self._stream is not None
        path, stream = self._path, self._stream
        stream.flush()
        os.fsync(stream.fileno())
        self._close()
        place = self._place(path)
        with place.open("rb") as written:
            found = hashlib.file_digest(written, "sha256").hexdigest()
        if found != digest or place.stat().st_size != self._plan[path]:
            place.unlink()
            self.wrong.append(path)
            return
        self._done[path] = None
        unit = _unit_of(path)
        if not unit:
            place.replace(self._folder / path)
        elif all(other in self._done for other in self._plan if _unit_of(other) == unit):
            self._complete(unit)
        fsync_directory(str(self._folder))

    def _complete(self, unit: str) -> None:
        folder = self._folder / f"{unit}{PARTIAL}"
        for stray in folder.rglob("*"):  # of another checkpoint of that name, whose pull was never ended
            if stray.is_file() and f"{unit}/{stray.relative_to(folder).as_posix()}" not in self._plan:
                stray.unlink()
        folder.rename(self._folder / unit)
        fsync_directory(str(self._folder / unit))

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def finish(self) -> Pulled:
        """Clean up after checkpoints that vanished, and report."""
        assert self.run is not None
        for unit in self._vanished:
            shutil.rmtree(self._folder / f"{unit}{PARTIAL}", ignore_errors=True)
        return Pulled(
            run=self.run,
            folder=str(self._folder),
            files=tuple(path for path in self._done if _unit_of(path) not in self._vanished),
            received=self._received,
            kept=tuple(name for name in self._kept if not any(_unit_of(path).endswith(name) for path in self._done)),
            vanished=tuple(unit.rpartition("/")[2] for unit in self._vanished),
            refused=tuple(visible(path, 200) for path in self._refused),
        )


def _unit_of(path: str) -> str:
    """The folder that is renamed as a whole: a checkpoint; empty for a file that stands alone."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "checkpoints" and len(parts) > 2 else ""


def _unpacked(data: bytes, size: int, packed: bool) -> bytes:
    try:
        found = zlib.decompressobj().decompress(data, _LARGEST_PIECE) if packed else data
    except zlib.error as error:
        raise BadAnswer(_DAMAGED) from error
    if len(found) != size:
        raise BadAnswer(_DAMAGED)
    return found
