"""Runs subprocesses for a bounded time."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from typing import Any, BinaryIO, Callable, Dict, NamedTuple, Optional, Sequence


class Completed(NamedTuple):
    """A subprocess that ended or was ended. `status` is None when it ran out of time or could not start."""

    status: Optional[int]
    stdout: str
    stderr: str
    error: str  # why status is None
    timed_out: bool = False


def scratch() -> BinaryIO:
    """A file in memory for what a subprocess says: works on a full disk, and needs no `tempfile`, slow to import."""
    return os.fdopen(os.memfd_create("dflash"), "w+b")


def call(
    argv: Sequence[str],
    timeout: float,
    env: Optional[Dict[str, str]] = None,
    keep: Sequence[int] = (),
    started: Callable[[int], object] = lambda pid: None,
) -> Completed:
    """Run a command for at most `timeout` seconds, with no stdin and English messages; never raises for its failure.

    A child that even SIGKILL cannot end (a driver call in D state) is left behind, not waited for.

    Args:
        keep: descriptors that the child inherits.
        started: is told the child's PID.
    """
    environment = dict(os.environ if env is None else env, LC_ALL="C")
    with scratch() as out, scratch() as err:
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                pass_fds=tuple(keep),
            )
        except OSError as error:
            return Completed(None, "", "", "%s: %s" % (argv[0], error.strerror))
        started(child.pid)
        status: Optional[int] = None
        problem = ""
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            problem = "%s did not end within %g s" % (os.path.basename(argv[0]), timeout)
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
        return Completed(status, _read_back(out), _read_back(err), problem, bool(problem))


def _read_back(stream: Any, limit: int = 4 * 1024 * 1024) -> str:
    stream.seek(0)
    data: bytes = stream.read(limit)
    return data.decode("utf-8", "backslashreplace")


def pass_on(
    child: "subprocess.Popen[bytes]",
    tick: Callable[[], object],
    told: Callable[[str, bytes], object],
    grace: float = 0.0,
) -> int:
    """Hand on a child's outputs (`out`, `err`) as they come, until they end; its status.

    Args:
        tick: called at least once a second; what it raises ends the child.
        grace: seconds from SIGTERM to SIGKILL then; 0: SIGKILL at once.
    """
    try:
        with selectors.DefaultSelector() as selector:
            for name, stream in (("out", child.stdout), ("err", child.stderr)):
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map():
                tick()
                for key, _ in selector.select(1):
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        told(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
        while True:
            try:
                return child.wait(1)
            except subprocess.TimeoutExpired:
                tick()
    finally:
        _end(child, grace)


def _end(child: "subprocess.Popen[bytes]", grace: float) -> None:
    """Leave nothing of a child behind: neither its process group nor our ends of its pipes."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        if child.poll() is None and seconds:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
