"""Asks a running trainer to save, by SIGUSR2, and watches for the new manifest."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, List

from dflash_ops.remote import files, status, systemd, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import RUN_FAILED, TEMPORARY, CheckpointAnswer, CheckpointRequest

_POLL = 0.25


def main(request: CheckpointRequest, channel: Channel) -> CheckpointAnswer:
    """Ask for a checkpoint and wait until it is there.

    Event: {run, asked}.
    """
    paths = which.find_run(request["root"], request.get("run"), changing=True)
    pid = _main_pid(paths)
    before = _manifests(paths)
    begin = time.monotonic()
    os.kill(pid, signal.SIGUSR2)
    channel.event(run=paths.run, asked=True)
    while True:
        new = [
            found for found in status.checkpoints_of(paths.checkpoints) if (found["name"], found["time"]) not in before
        ]
        if new:
            return {"run": paths.run, "checkpoint": new[-1], "seconds": time.monotonic() - begin}
        if not os.path.exists("/proc/%d" % pid):
            raise Refusal(
                RUN_FAILED,
                "the run %s ended before the checkpoint was written" % paths.run,
                "`dflash status %s` says how" % paths.run,
                "not-running",
            )
        if time.monotonic() - begin > float(request["timeout"]):
            raise Refusal(
                TEMPORARY,
                "no new checkpoint within %g s; the trainer was asked and may still write it" % request["timeout"],
                "`dflash status %s` shows the newest one" % paths.run,
            )
        channel.pause(_POLL)


def _manifests(paths: RunPaths) -> List[Any]:
    return [(found["name"], found["time"]) for found in status.checkpoints_of(paths.checkpoints)]


def _main_pid(paths: RunPaths) -> int:
    """The trainer's PID, when it is this run's and listens for the signal. Raises Refusal."""
    unit = systemd.show_units([paths.unit])[paths.unit]
    if unit.get("ActiveState") != "active" or unit.get("SubState") != "running":
        message = "the run %s is not running" % paths.run
        raise Refusal(RUN_FAILED, message, "`dflash status %s` says how it is" % paths.run, "not-running")
    started = files.read_json(paths.started) or {}
    if started.get("invocation_id") != unit.get("InvocationID"):
        raise Refusal(
            TEMPORARY, "the unit of run %s was started again by something else than dflash" % paths.run, "", "identity"
        )
    pid = int(unit.get("MainPID", "0"))
    # Before the trainer has set its handler, the signal would kill it.
    if not _catches(pid, signal.SIGUSR2):
        raise Refusal(
            TEMPORARY,
            "the trainer of run %s does not take requests yet" % paths.run,
            "try again after its first step (`dflash wait %s --for step`)" % paths.run,
            "not-listening",
        )
    return pid


def _catches(pid: int, number: int) -> bool:
    try:
        with open("/proc/%d/status" % pid) as stream:
            for line in stream:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False
