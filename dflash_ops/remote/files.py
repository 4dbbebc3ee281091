"""Reads and writes a run's files: paths, crash-safe writes, locks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from dflash_ops.remote import protocol
from dflash_ops.remote.channel import Refusal
from dflash_ops.remote.lines import last_lines
from dflash_ops.remote.protocol import CONFIGURATION, TEMPORARY, USAGE

RUN_NAME = re.compile(protocol.RUN_NAME + r"\Z")
ROOT = re.compile(r"(/[A-Za-z0-9._-]+)+\Z")


def fsync_directory(path: str) -> None:
    """Make renames and new names in a directory durable, where the file system can: some answer EINVAL."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Write all or nothing: temporary file, fsync, rename, fsync of the directory."""
    directory = os.path.dirname(path)
    temporary = "%s.tmp-%d" % (path, os.getpid())
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)  # whatever the umask
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(directory)


def write_json(path: str, value: Any, mode: int = 0o644) -> None:
    """`write_file` of a JSON document."""
    write_file(path, (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode("utf-8"), mode)


def read_json(path: str, limit: int = 16 * 1024 * 1024) -> Optional[Dict[str, Any]]:
    """A JSON object; None when the file is missing, too large, or not one."""
    try:
        with open(path, "rb") as stream:
            value = json.loads(stream.read(limit))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def tree_bytes(path: str) -> int:
    """Disk space of a file or a whole folder, links not followed."""
    total = 0
    with contextlib.suppress(OSError):
        total += os.lstat(path).st_blocks * 512
    for here, folders, names in os.walk(path):
        for name in folders + names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(here, name)).st_blocks * 512
    return total


def tail_lines(path: str, lines: int, limit: int = 64 * 1024) -> List[str]:
    """The last lines of a text file, in at most `limit` bytes; empty when there is no file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would wait for a writer
            return []
        with open(path, "rb") as stream:
            return last_lines(stream, lines, limit)
    except OSError:
        return []


class RunPaths:
    """The files of one run in the container. `dflash_ops.run.record` is the laptop's view of the same names."""

    def __init__(self, root: str, run: str) -> None:
        if not RUN_NAME.match(run):
            raise Refusal(USAGE, "%r is not a run name" % run)
        self.run = run
        self.unit = protocol.unit_name(run)
        self.directory = os.path.join(checked_root(root), "runs", run)
        self.spec = self._file("spec")
        self.facts = self._file("facts")
        self.started = self._file("started")
        self.exit = self._file("exit")
        self.kill_requested = self._file("kill_requested")
        self.config = self._file("config")
        self.entry = self._file("entry")
        self.on_exit = self._file("on_exit")
        self.env = self._file("env")
        self.log = self._file("log")
        self.metrics = self._file("metrics")
        self.compile = self._file("compile")
        self.checkpoints = self._file("checkpoints")

    def _file(self, name: str) -> str:
        return os.path.join(self.directory, protocol.RUN_FILES[name])


def checked_root(root: str) -> str:
    """dflash's root folder, refused unless it is a plain absolute path."""
    if not ROOT.match(root) or ".." in root.split("/"):
        raise Refusal(CONFIGURATION, "%r is not a usable root folder" % root)
    return root


def run_names(root: str) -> List[str]:
    """All runs, the newest first, by what each recorded of itself at its launch.

    Those of the container's present boot come first, by the clock that nobody sets; those of earlier boots follow, by
    the time of day that each saw. A file's time counts only where a run left nothing else.
    """
    base = os.path.join(checked_root(root), "runs")
    try:
        entries = [entry for entry in os.scandir(base) if RUN_NAME.match(entry.name)]
    except OSError:
        return []
    found = []
    with open("/proc/sys/kernel/random/boot_id") as stream:
        boot = stream.read().strip()
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                found.append((_made(entry, boot), entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def _made(entry: "os.DirEntry[str]", boot: str) -> Tuple[bool, float]:
    """When a run was made: in this boot or not, and a moment that orders it among the others of its kind."""
    spec = read_json(os.path.join(entry.path, "spec.json")) or {}
    created, monotonic = spec.get("created"), spec.get("monotonic")
    if not isinstance(created, (int, float)):
        created = entry.stat(follow_symlinks=False).st_mtime
    if spec.get("boot_id", boot) != boot:
        return False, float(created)
    if not isinstance(monotonic, (int, float)):
        monotonic = time.clock_gettime(time.CLOCK_MONOTONIC) - (time.time() - created)
    return True, float(monotonic)


@contextlib.contextmanager
def locked(path: str, seconds: float) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel lets go of it when the program dies. Raises Refusal."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > end:
                    message = "another dflash command holds %s" % path
                    raise Refusal(TEMPORARY, message, "try again in a moment", "lock") from error
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)
