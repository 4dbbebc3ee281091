"""Asks nvidia-smi for a bounded time, and never again while an earlier question hangs."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import time
from typing import Any, Dict, Optional

from dflash_ops.remote import process

# All known to drivers from 450 on; an unknown field would void the whole answer.
FIELDS = [
    "index",
    "uuid",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "mig.mode.current",
    "driver_version",
    "pci.bus_id",
]


def ask(root: str, limit: float = 10.0) -> Dict[str, Any]:
    """The raw answer that `dflash_ops.run.probes.gpu.RawGpu` describes. Never raises.

    Args:
        root: the container's root folder; the lock that keeps questions from piling up stands there.
        limit: seconds for waiting on another question and for our own together.
    """
    return {
        "fields": FIELDS,
        "command": _query(os.path.join(root, "gpu.lock"), limit),
        "nodes": sorted(glob.glob("/dev/nvidia*")),
        "driver": kernel_driver(),
    }


def kernel_driver() -> Optional[str]:
    """The version of the driver in the kernel, which LXC containers share with the node."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as stream:
            words = stream.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _query(lock_path: str, limit: float) -> Dict[str, Any]:
    found = (os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path())
    program = next((path for path in found if os.access(path, os.X_OK)), None)
    if program is None:
        return {"state": "missing"}
    lock = None
    with contextlib.suppress(OSError):  # a full or read-only disk: ask without the lock
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + limit
        while lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    return _busy(lock)
                time.sleep(0.05)
        return _run(program, lock, max(1.0, end - time.monotonic()))
    finally:
        if lock is not None:
            os.close(lock)


def _run(program: str, lock: Optional[int], limit: float) -> Dict[str, Any]:
    argv = [program, "--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]

    def note(pid: int) -> None:
        if lock is not None:
            with contextlib.suppress(OSError):
                os.pwrite(lock, b"%-20d" % pid, 0)

    # The child shares our lock: a child that cannot be killed (a driver call in D state) keeps holding it after we are
    # gone, and the kernel lets go of it when the child ends.
    done = process.call(argv, limit, keep=() if lock is None else (lock,), started=note)
    if done.timed_out:
        return {"state": "timeout", "seconds": limit}
    if done.status is None:
        return {"state": "broken", "message": done.error}
    return {"state": "ran", "rc": done.status, "stdout": done.stdout, "stderr": done.stderr}


def _busy(lock: int) -> Dict[str, Any]:
    text = os.pread(lock, 20, 0).strip()
    seconds = max(0.0, time.time() - os.fstat(lock).st_mtime)
    return {"state": "busy", "pid": int(text) if text.isdigit() else 0, "seconds": seconds}
