"""Reads what the unit, the log and the GPUs say about a run, in one round trip; judges nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from typing import Any, Dict, List, Optional

from dflash_ops.remote import files, gpu, process, systemd, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import SavedCheckpoint, Snapshot, StatusRequest, Wanted

# Keys of a metrics line that the laptop draws a history of; the newest line goes over whole.
_HISTORY = ("step", "total_steps", "time", "loss", "accept_length", "tokens_per_second", "step_seconds")
_UNIT_SUCCESS = "7ad2d189f7e94e70a38c781354912448"  # SD_MESSAGE_UNIT_SUCCESS of systemd
_MEASURABLE = 0.2  # seconds: CPU time is counted in ticks of 10 ms
_CHECKPOINT = re.compile(r"step-([0-9]{1,12})\Z")


def main(request: StatusRequest, channel: Channel) -> Snapshot:
    """Probe a run.

    With `every`, events: a snapshot each, until the unit is gone.
    """
    paths = which.find_run(request["root"], request.get("run"))
    every = request.get("every")
    if every is None:
        return snapshot(paths, request)
    while True:
        seen = snapshot(paths, request)
        if over(seen):
            return seen
        channel.event(**seen)
        channel.pause(float(every))


def over(seen: Snapshot) -> bool:
    """Whether nothing more will happen: systemd says that the unit is gone, and no launch is under way."""
    properties = seen["unit"].get("properties")
    if properties is None:
        return False
    if properties.get("LoadState") == "not-found":
        # Between a launch's mkdir and its systemd-run the unit is absent as well.
        records = seen["records"]
        made_in = (records["spec"] or {}).get("boot_id", systemd.boot_id())
        begun = records["started"] or records["exit"] or records["unreadable"] or made_in != systemd.boot_id()
        return bool(begun) or seen["age"] > 120
    return systemd.is_over(properties)


def state(paths: RunPaths, unit: Optional[Dict[str, Any]] = None) -> Snapshot:
    """What `over` needs. The unit is read before the records: a unit that ends in between leaves its exit.json.

    Args:
        unit: the unit's answer, when it was read already.
    """
    unit = unit or unit_of(paths.unit)
    records = records_of(paths)
    started = records["started"]
    gone = (unit.get("properties") or {}).get("LoadState") == "not-found"
    if gone and started and records["exit"] is None and started.get("boot_id") == systemd.boot_id():
        records["exit"] = exit_from_journal(paths, str(started.get("invocation_id")))
    return {"unit": unit, "records": records, "age": _age(paths)}


def snapshot(paths: RunPaths, request: Wanted, unit: Optional[Dict[str, Any]] = None) -> Snapshot:
    """One reading of everything."""
    seen = state(paths, unit)
    before = _cpu(seen["unit"])
    log = log_of(paths.log, int(request.get("lines", 50)))
    seen["run"] = paths.run
    seen["log"] = log
    seen["disk"] = _disk(paths.directory)
    seen["metrics"] = metrics_of(paths.metrics, int(request.get("steps", 240)))
    seen["compiled"] = compiled_of(paths.compile)
    seen["checkpoints"] = checkpoints_of(paths.checkpoints)[-3:]
    seen["gpu"] = gpu.ask(request["root"]) if request.get("gpu", True) else None
    seen["boot_id"] = systemd.boot_id()
    seen["time"] = time.time()
    seen["monotonic"] = time.clock_gettime(time.CLOCK_MONOTONIC)
    seen["cpu"] = _busy(seen["unit"], before, log, seen["time"])
    return seen


def unit_of(name: str) -> Dict[str, Any]:
    """systemd's answer about a unit, or why there is none."""
    try:
        return {"kind": "shown", "properties": systemd.show_units([name])[name]}
    except Refusal as refusal:
        return {"kind": "error", "message": refusal.message}
    except KeyError:
        return {"kind": "error", "message": "systemctl did not name the unit"}


def records_of(paths: RunPaths) -> Dict[str, Any]:
    """The run directory's JSON files; `unreadable` names those that are there and cannot be read."""
    found: Dict[str, Any] = {"unreadable": []}
    for name in ("spec", "started", "exit", "kill_requested"):
        path = getattr(paths, name)
        found[name] = files.read_json(path)
        if found[name] is None and os.path.lexists(path):
            found["unreadable"].append(os.path.basename(path))
    return found


def exit_from_journal(paths: RunPaths, invocation_id: str) -> Optional[Dict[str, Any]]:
    """The end of a run whose recorder could not write exit.json: systemd forgets a unit that ended well, and only the
    journal remembers it. The recorder's own words, which it logs when the disk is full, come before systemd's."""
    command = ["journalctl", "--quiet", "--boot", "--output=json", "--lines=200"]
    recorder = "SYSLOG_IDENTIFIER=dflash-%s" % paths.run
    done = process.call([*command, "UNIT=%s" % paths.unit, "_PID=1", "+", recorder, "_UID=0"], 10)
    code, status, ended, asked = "exited", "0", None, False  # systemd logs how the process exited only when badly
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            entry = json.loads(line)
            if entry.get("SYSLOG_IDENTIFIER") == "dflash-%s" % paths.run:
                said = json.loads(entry["MESSAGE"])
                if said.get("invocation_id") == invocation_id:
                    return dict(said)
            elif entry.get("INVOCATION_ID") == invocation_id:
                code, status = entry.get("EXIT_CODE", code), entry.get("EXIT_STATUS", status)
                asked = asked or entry.get("JOB_TYPE") == "stop"
                if entry.get("MESSAGE_ID") == _UNIT_SUCCESS:
                    ended = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    if ended is None:
        return None
    return {
        "time": ended,
        "result": "success",
        "exit_code": code,
        "exit_status": status,
        "invocation_id": invocation_id,
        "boot_id": systemd.boot_id(),
        "stop_requested": asked,
    }


def _age(paths: RunPaths) -> float:
    """Seconds since the run was asked for."""
    for path in (paths.spec, paths.directory):
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - os.stat(path).st_mtime)
    return 0.0


def log_of(path: str, lines: int) -> Dict[str, Any]:
    """Size, identity and age of the log by the container's clock, and its last lines."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return {"kind": "missing"}
    except OSError as error:
        return {"kind": "error", "message": str(error)}
    if not stat.S_ISREG(found.st_mode):  # opening a FIFO would wait for a writer
        return {"kind": "error", "message": "%s is no ordinary file" % path}
    return {
        "kind": "file",
        "size": found.st_size,
        "inode": found.st_ino,
        "mtime": found.st_mtime,
        "lines": files.tail_lines(path, lines),
    }


def _disk(path: str) -> Optional[Dict[str, int]]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "inodes_free": found.f_favail,
        "inodes_total": found.f_files,
    }


def metrics_of(path: str, count: int) -> Dict[str, Any]:
    """The newest step line and the newest held-out line whole, `count` step lines reduced, and the file's mtime."""
    try:
        mtime = os.stat(path).st_mtime
    except OSError:
        return {"mtime": None, "steps": [], "last": None, "held_out": None}
    steps: List[Dict[str, Any]] = []
    last: Optional[Dict[str, Any]] = None
    held_out: Optional[Dict[str, Any]] = None
    for line in files.tail_lines(path, 2 * count, 2048 * count):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the first line of the window, or one that is being written
        if isinstance(record, dict) and record.get("kind") == "step":
            last = record
            steps.append({key: record[key] for key in _HISTORY if key in record})
        elif isinstance(record, dict) and record.get("kind") == "held_out":
            held_out = record
    return {"mtime": mtime, "steps": steps[-count:], "last": last, "held_out": held_out}


def compiled_of(path: str) -> Optional[List[Dict[str, Any]]]:
    """What each of the trainer's workers runs as, and what it went without; None before the compilation has ended."""
    try:
        with open(path, "rb") as stream:
            found = json.loads(stream.read(1024 * 1024))
    except (OSError, ValueError):
        return None
    if not isinstance(found, list):
        return None
    workers = [worker for worker in found if isinstance(worker, dict)]
    return [{key: worker.get(key) for key in ("worker", "mode", "note", "allowed_by")} for worker in workers[:64]]


def checkpoints_of(path: str) -> List[SavedCheckpoint]:
    """The checkpoints that have a manifest, which is written last; oldest first."""
    found: List[SavedCheckpoint] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            match = _CHECKPOINT.match(entry.name)
            with contextlib.suppress(OSError):
                if match:
                    made = os.stat(os.path.join(entry.path, "manifest.json"))
                    found.append({"name": entry.name, "step": int(match.group(1)), "time": made.st_mtime})
    return sorted(found, key=lambda checkpoint: checkpoint["step"])


def _text(path: str, limit: int = 256 * 1024) -> Optional[str]:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "backslashreplace")
    except OSError:
        return None


def _cpu(unit: Dict[str, Any]) -> Optional[List[float]]:
    """[monotonic seconds, CPU seconds] of the unit's main process and its children."""
    pid = unit.get("properties", {}).get("MainPID", "0")
    if not pid.isdigit() or pid == "0":
        return None
    ticks = 0
    pids = [pid]
    for task in _names("/proc/%s/task" % pid):
        pids += (_text("/proc/%s/task/%s/children" % (pid, task)) or "").split()
    for one in pids:
        fields = (_text("/proc/%s/stat" % one) or "").rpartition(")")[2].split()
        if len(fields) > 12:
            ticks += int(fields[11]) + int(fields[12])
    return [time.monotonic(), ticks / os.sysconf("SC_CLK_TCK")]


def _names(path: str) -> List[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _busy(
    unit: Dict[str, Any], before: Optional[List[float]], log: Dict[str, Any], now: float
) -> Optional[Dict[str, float]]:
    """CPU seconds used over an interval; a second is spent on it only when the log has been silent, else it is given
    when the other probes took long enough for the kernel's clock ticks to say something.
    """
    if before is None:
        return None
    silent = log["kind"] != "file" or now - log["mtime"] > 30
    if silent:
        time.sleep(max(0.0, 1.0 - (time.monotonic() - before[0])))
    after = _cpu(unit)
    if after is None or after[0] - before[0] < _MEASURABLE:
        return None
    return {"used": max(0.0, after[1] - before[1]), "over": after[0] - before[0]}
