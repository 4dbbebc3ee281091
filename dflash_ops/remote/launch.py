"""Makes and starts a run under one lock, so that it exists wholly or not at all; then watches it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from typing import Any, Dict, List, Mapping, Optional

from dflash_ops.remote import files, preflight, process, protocol, status, systemd, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import CONFIGURATION, TEMPORARY, LaunchAnswer, LaunchRequest, Spec

FILES = tuple(protocol.RUN_FILES[name] for name in ("config", "entry", "on_exit", "env"))
_POLL = 0.2  # seconds between looks at the run's files
_UNIT_EVERY = 1.0  # seconds between questions to systemd
# The first lines of a trainer that dies at import are its traceback: it gets time to die before it counts as begun.
_TROUBLE = re.compile(rb"^(Traceback \(most recent|\S+ (ERROR|CRITICAL) )", re.MULTILINE)
_DYING = 5.0


def main(request: LaunchRequest, channel: Channel) -> LaunchAnswer:
    """Start a run and watch it.

    Events: {stage}, {status}.
    """
    paths = RunPaths(request["root"], request["run"])
    version = preflight.systemd_version()
    facts = _facts(request, channel)
    runs = os.path.dirname(paths.directory)
    os.makedirs(runs, exist_ok=True)
    os.makedirs(os.path.join(request["root"], "cache", "compile"), exist_ok=True)
    with files.locked(os.path.join(request["root"], "launch.lock"), 60):
        # A launch that was given up while the container was frozen must not happen when it thaws.
        channel.pause(0)
        # From here to the end of the lock nothing is said, so that a laptop that is gone cannot stop us half-way.
        _refuse_twin(paths, version)
        _refuse_busy_gpus(request["root"], request["spec"])
        if not os.path.isdir(request["facts"]["release"]):  # gc may have come between
            raise Refusal(TEMPORARY, "the release %s is gone" % request["spec"]["release"], "launch again")
        try:
            _make(paths, request, facts)
            _run_unit(paths, request["argv"])
        except BaseException:
            _forget_unstarted(paths)
            raise
        try:
            record_start(paths, version)
        except OSError:
            _undo(paths)  # a disk that is full by now would not let it live either
            raise
    channel.event(stage="started")
    reached = _watch(paths, request["wait"], float(request["timeout"]), channel)
    return {
        "reached": reached,
        "snapshot": status.snapshot(paths, {"root": request["root"], "gpu": False, "lines": 200}),
    }


# ---- before ------------------------------------------------------------------------------------------------


def _facts(request: LaunchRequest, channel: Channel) -> Dict[str, Any]:
    """What is true in the container now: stored with the run."""
    channel.event(stage="facts")
    from dflash_ops.remote import facts

    found: Dict[str, Any] = facts.collect(request["facts"])
    channel.event(stage="start")
    return found


def _refuse_twin(paths: RunPaths, version: int) -> None:
    """A name is used once. What a launch left that was cut off is finished or cleared first."""
    unit = systemd.unit_of(paths.unit)
    loaded = unit.get("LoadState") not in (None, "not-found")
    if os.path.lexists(paths.directory):
        started = os.path.exists(paths.started)
        if not started and (loaded or os.path.exists(paths.exit)):
            # Cut off between systemd-run and started.json: the run is real.
            record_start(paths, version)
            started = True
        if started:
            raise preflight.taken(paths, unit)
        _forget_unstarted(paths)  # cut off before its unit: nothing ever ran
    elif loaded:
        if not systemd.is_over(unit):
            message = "the unit %s runs already, and not for a run of %s" % (
                paths.unit,
                os.path.dirname(paths.directory),
            )
            raise Refusal(TEMPORARY, message, "choose another run name", "taken")
        # A failed unit whose run directory was removed by hand keeps its name until it is reset.
        process.call(["systemctl", "reset-failed", paths.unit], 10)


def _refuse_busy_gpus(root: str, spec: Spec) -> None:
    """GPUs are held by one live run at a time."""
    wanted = _gpus(spec)
    if not wanted:
        return
    held = {one.run: one.gpus for one in which.live_runs()}
    unfinished = [run for run in files.run_names(root) if not os.path.exists(RunPaths(root, run).exit)]
    shown = systemd.show_units([RunPaths(root, run).unit for run in unfinished])
    for run in unfinished:  # a unit that systemd does not name may live all the same
        if run not in held and not systemd.is_over(shown.get(RunPaths(root, run).unit, {})):
            held[run] = _gpus(files.read_json(RunPaths(root, run).spec) or {})
    for run, theirs in sorted(held.items()):
        if theirs & wanted:
            numbers = ", ".join(str(index) for index in sorted(theirs & wanted))
            raise Refusal(
                TEMPORARY,
                "the run %s holds GPU %s" % (run, numbers),
                "wait for it (`dflash wait %s`), name other GPUs, or stop it by --replace" % run,
                "gpus-held:" + run,
            )


def _gpus(spec: Mapping[str, Any]) -> "set[int]":
    held = spec.get("gpus") or {}
    return {int(index) for role in ("target", "drafters") for index in held.get(role) or []}


# ---- making ------------------------------------------------------------------------------------------------


def _make(paths: RunPaths, request: LaunchRequest, facts: Dict[str, Any]) -> None:
    """The run directory and all that stands in it before the start. spec.json comes last: with it a run is whole."""
    os.mkdir(paths.directory, 0o755)
    for name in FILES:
        mode = {"env": 0o600, "entry": 0o755, "on-exit": 0o755}.get(name, 0o644)
        files.write_file(os.path.join(paths.directory, name), request["files"][name].encode("utf-8"), mode)
    files.write_json(paths.facts, facts)
    files.write_json(paths.spec, _stamped(request["spec"]))
    files.fsync_directory(os.path.dirname(paths.directory))


def _stamped(spec: Spec) -> Dict[str, Any]:
    """The spec with the moment of its launch, by a clock that nobody sets too: the order of runs stands on it."""
    monotonic = time.clock_gettime(time.CLOCK_MONOTONIC)
    return dict(spec, created=time.time(), monotonic=monotonic, boot_id=systemd.boot_id())


def _run_unit(paths: RunPaths, argv: List[str]) -> None:
    """Hand the run to systemd. Its exit code says little: a trainer that fails at once may or may not fail it."""
    done = process.call(argv, 60)
    unit = systemd.unit_of(paths.unit)
    if done.status == 0 or os.path.exists(paths.exit) or unit.get("LoadState") == "loaded":
        return
    said = (done.stderr.strip().splitlines() or [done.error or "no reason given"])[-1]
    if "already loaded" in said or "already exists" in said:
        raise Refusal(TEMPORARY, "the unit name %s is taken" % paths.unit, "choose another run name", "taken")
    raise Refusal(CONFIGURATION, "systemd did not start the run: %s" % said, "`dflash doctor` looks for the cause")


def _forget_unstarted(paths: RunPaths) -> None:
    """Remove the directory of a run whose unit never existed."""
    with contextlib.suppress(Refusal):
        unit = systemd.unit_of(paths.unit)
        if unit.get("LoadState") in ("not-found", "masked") and not os.path.exists(paths.exit):
            shutil.rmtree(paths.directory, ignore_errors=True)


def _undo(paths: RunPaths) -> None:
    """End a unit that could not be recorded, and leave nothing of its run."""
    for words in (["kill", "--signal=KILL"], ["stop"]):
        process.call(["systemctl", *words, paths.unit], 20)
    process.call(["systemctl", "reset-failed", paths.unit], 10)
    shutil.rmtree(paths.directory, ignore_errors=True)


def record_start(paths: RunPaths, version: int) -> None:
    """started.json, from what systemd says now; from the exit record when the unit is gone already."""
    unit = systemd.unit_of(paths.unit)
    ended = files.read_json(paths.exit) or {}
    pid = int(unit.get("MainPID") or 0)
    started = {
        "time": time.time(),
        "unit": paths.unit,
        "invocation_id": unit.get("InvocationID") or ended.get("invocation_id") or "",
        "boot_id": systemd.boot_id(),
        "main_pid": pid,
        "systemd_version": str(version),
        "limits": _limits(pid),
    }
    files.write_json(paths.started, started)


def _limits(pid: int) -> Dict[str, str]:
    """What the container really granted: systemd clamps limits without a word."""
    found = {}
    with contextlib.suppress(OSError), open("/proc/%d/limits" % pid) as stream:
        for line in stream:
            for key in ("Max open files", "Max locked memory"):
                if pid and line.startswith(key):
                    found[key] = line[len(key) :].split()[0]
    return found


# ---- watching ----------------------------------------------------------------------------------------------


def _watch(paths: RunPaths, wait: str, timeout: float, channel: Channel) -> str:
    """Until what is waited for is there, the run has ended, or time is up."""
    if wait == "none":
        return "none"
    end = time.monotonic() + timeout
    asked = -_UNIT_EVERY
    said = None
    runs = False
    begun: Optional[float] = None
    while True:
        now = time.monotonic()
        over = os.path.exists(paths.exit)
        if over or now - asked >= _UNIT_EVERY:
            asked = now
            unit = systemd.unit_of(paths.unit)
            if systemd.is_over(unit):
                return "ended"
            runs = unit.get("ActiveState") == "active"
            text = unit.get("StatusText") or None
            if text != said:
                said = text
                channel.event(status=text)
        if runs and wait == "started":
            lines = _complete_lines(paths.log)
            if lines and begun is None:
                begun = now
            if begun is not None and (not _TROUBLE.search(lines) or now - begun >= _DYING):
                return "started"
        if wait == "step" and _has_step(paths.metrics):
            return "step"
        if now >= end:
            return "timeout"
        channel.pause(min(_POLL, max(0.01, end - now)))


def _complete_lines(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(65536).rpartition(b"\n")[0]
    except OSError:
        return b""


def _has_step(path: str) -> bool:
    """Whether the trainer wrote its first optimizer step."""
    try:
        with open(path, "rb") as stream:
            lines = stream.read(1 << 20).split(b"\n")[:-1]
    except OSError:
        return False
    return any(_kind(line) == "step" for line in lines)


def _kind(line: bytes) -> Optional[str]:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    kind = value.get("kind") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None
