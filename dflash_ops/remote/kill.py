"""Ends a run: asks, waits, forces, confirms, and reports each step."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Dict, Optional

from dflash_ops.remote import files, gpu, process, status, systemd, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import STOP_SECONDS, TEMPORARY, KillAnswer, KillRequest, Wanted

_POLL = 0.2
_AFTER_FORCE = 15.0  # seconds for systemd to bury what was killed and for the recorder to write
_GPU_FREE = 20.0  # seconds for the driver to give the memory back
_LAUNCH = 45.0  # seconds for a launch of the same run to let go of its lock


def main(request: KillRequest, channel: Channel) -> KillAnswer:
    """Stop a run.

    Events: {run, state}, {waited}.
    """
    paths = which.find_run(request["root"], request.get("run"), changing=True)
    unit = systemd.unit_of(paths.unit)
    if systemd.is_over(unit) and not os.path.exists(paths.started):
        # A launch may be under way: between its mkdir and its started.json, which it holds the lock for, there is no
        # unit yet. It must not begin after we have said that the run has ended.
        with files.locked(os.path.join(request["root"], "launch.lock"), _LAUNCH):
            unit = systemd.unit_of(paths.unit)
    started = files.read_json(paths.started) or {}
    if systemd.is_over(unit):
        channel.event(run=paths.run, state="already ended")
        return _answer("already-ended", paths, request, None)
    if started.get("invocation_id") and unit.get("InvocationID") not in ("", started["invocation_id"]):
        raise Refusal(
            TEMPORARY,
            "the unit %s is now somebody else's (its invocation is not the run's)" % paths.unit,
            "look at it with `systemctl status %s` in the container" % paths.unit,
        )
    used = _gpu_memory(paths, request)
    channel.pause(0)  # a kill that was given up while the container was frozen must not happen when it thaws
    if systemd.is_over(systemd.unit_of(paths.unit)) or os.path.exists(paths.exit):
        # It ended by itself while nvidia-smi was asked: a kill request now would hide how.
        channel.event(run=paths.run, state="already ended")
        return _answer("already-ended", paths, request, None)
    grace, force = float(request["grace"]), bool(request["force"])
    if not _ask(paths, grace, force, request["by"]):
        channel.event(run=paths.run, state="already ended")
        return _answer("already-ended", paths, request, None)
    channel.event(run=paths.run, state="asked to stop")
    outcome = "killed" if force else "stopped"
    if not force and not _gone(paths, grace, channel):
        outcome = "killed"
        channel.event(run=paths.run, state="still there after %g s: killed" % grace)
        _force(paths)
    if not _gone(paths, _AFTER_FORCE, channel):
        raise Refusal(
            TEMPORARY,
            "the run %s is still there after SIGKILL: a process of it hangs in the kernel" % paths.run,
            "often a GPU driver call: look at dmesg on the node; restarting the container ends it",
            "unkillable",
        )
    channel.event(run=paths.run, state="unit gone")
    if used is not None:
        _wait_for_gpus(request, channel)
    return _answer(outcome, paths, request, used)


def _ask(paths: RunPaths, grace: float, force: bool, by: str) -> bool:
    """Record who asks and ask systemd; false when the unit ended before. Raises Refusal when systemd does not do it."""
    earlier = files.read_json(paths.kill_requested) or {"sent": False}
    sent = bool(earlier.get("sent", True))
    wish = {"time": time.time(), "by": by, "grace": grace, "force": force, "sent": sent}
    if force or not sent:
        # The record comes first: whatever happens next, an end that follows will be known as asked for. `sent` comes
        # when systemd took it: without that, a run that goes on and ends by itself later was not stopped by us.
        files.write_json(paths.kill_requested, wish)
    if force:
        refused = _force(paths)
    elif grace <= STOP_SECONDS:
        # systemd itself ends the run after its own time, even if we are gone by then.
        refused = _systemctl("--no-block", "stop", paths.unit)
    else:
        refused = _systemctl("kill", "--kill-who=main", "--signal=TERM", paths.unit)
    if refused is not None:
        if not sent:
            os.unlink(paths.kill_requested)
        if not systemd.is_over(systemd.unit_of(paths.unit)):
            hint = "look at it with `systemctl status %s` in the container" % paths.unit
            raise Refusal(TEMPORARY, "systemd did not stop the run %s: %s" % (paths.run, refused), hint, "refused")
        return False
    if not sent:
        with contextlib.suppress(OSError):  # a disk that is full by now: the end itself must tell
            files.write_json(paths.kill_requested, dict(wish, sent=True))
    return True


def _answer(outcome: str, paths: RunPaths, request: KillRequest, used: Optional[Dict[str, Any]]) -> KillAnswer:
    wanted: Wanted = {"root": request["root"], "gpu": used is not None, "lines": 50}
    return {"outcome": outcome, "gpu": used, "snapshot": status.snapshot(paths, wanted)}


def _systemctl(*words: str) -> Optional[str]:
    """None when systemd took it, else why not. Raises Refusal when it did not answer: it may have taken it."""
    done = process.call(["systemctl", *words], 20)
    if done.status is None:
        raise Refusal(TEMPORARY, "systemd in the container did not answer: %s" % done.error, "try again", "systemd")
    return None if done.status == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _force(paths: RunPaths) -> Optional[str]:
    """SIGKILL, and a stop, so that nothing starts it again. As `_systemctl`: None when one of the two was taken."""
    killed = _systemctl("kill", "--signal=KILL", paths.unit)
    stopped = _systemctl("--no-block", "stop", paths.unit)
    return killed and stopped


def _gone(paths: RunPaths, seconds: float, channel: Channel) -> bool:
    """Wait for the unit to be gone and its recorder to be done."""
    begin = time.monotonic()
    told = 0.0
    while True:
        if systemd.is_over(systemd.unit_of(paths.unit)):
            return True
        waited = time.monotonic() - begin
        if waited >= seconds:
            return False
        if waited - told >= 5:
            told = waited
            channel.event(waited=round(waited))
        channel.pause(min(_POLL, max(0.01, seconds - waited)))


def _gpu_memory(paths: RunPaths, request: KillRequest) -> Optional[Dict[str, Any]]:
    """nvidia-smi's answer while the run still holds its GPUs; None for a run on CPU."""
    spec = files.read_json(paths.spec) or {}
    held = spec.get("gpus") or {}
    if not (held.get("target") or held.get("drafters")):
        return None
    return gpu.ask(request["root"])


def _wait_for_gpus(request: KillRequest, channel: Channel) -> None:
    """The driver gives memory back a moment after the process: wait until two answers are the same."""
    end = time.monotonic() + _GPU_FREE
    before = None
    while time.monotonic() < end:
        now = gpu.ask(request["root"])["command"]
        if now.get("state") != "ran" or _memory(now) == before:
            return
        before = _memory(now)
        channel.pause(1.0)


def _memory(command: Dict[str, Any]) -> str:
    column = gpu.FIELDS.index("memory.used")
    rows = [line.split(",") for line in str(command.get("stdout", "")).splitlines()]
    return ";".join(row[column].strip() for row in rows if len(row) > column)
