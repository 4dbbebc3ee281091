"""Runs subprocesses for a bounded time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any, BinaryIO, Dict, NamedTuple, Optional, Sequence


class Completed(NamedTuple):
    """A subprocess that ended or was ended. `status` is None when it ran out of time or could not start."""

    status: Optional[int]
    stdout: str
    stderr: str
    error: str  # why status is None


def scratch() -> BinaryIO:
    """A file in memory for what a subprocess says: works on a full disk, and needs no `tempfile`, slow to import."""
    return os.fdopen(os.memfd_create("dflash"), "w+b")


def call(argv: Sequence[str], timeout: float, env: Optional[Dict[str, str]] = None) -> Completed:
    """Run a command for at most `timeout` seconds, with no stdin and English messages; never raises for its failure.

    A child that even SIGKILL cannot end (a driver call in D state) is left behind, not waited for.
    """
    environment = dict(os.environ if env is None else env, LC_ALL="C")
    with scratch() as out, scratch() as err:
        try:
            child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except OSError as error:
            return Completed(None, "", "", "%s: %s" % (argv[0], error.strerror))
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
        return Completed(status, _read_back(out), _read_back(err), problem)


def _read_back(stream: Any, limit: int = 4 * 1024 * 1024) -> str:
    stream.seek(0)
    data: bytes = stream.read(limit)
    return data.decode("utf-8", "backslashreplace")
