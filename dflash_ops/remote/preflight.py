"""Checks that a run can be started in this container, before anything is sent or made."""

from __future__ import annotations

import glob
import json
import os
import re
import time
from typing import Dict, List

from dflash_ops.remote import files, process, store, systemd
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import CONFIGURATION, MIN_SYSTEMD, TEMPORARY, USAGE, PreflightAnswer, PreflightRequest

MIN_FREE = 64 * 1024 * 1024  # bytes: a run's own files and its first log lines
_GPU_NODE = re.compile(r"/dev/nvidia\d+\Z")
_ASK = "import sys,json;print(json.dumps([list(sys.version_info[:3]),sys.executable]))"


def main(request: PreflightRequest, channel: Channel) -> PreflightAnswer:
    """What is there for the run, and what is missing. Raises Refusal for what stands in its way."""
    root = files.checked_root(request["root"])
    paths = RunPaths(root, request["run"])
    if os.path.exists(paths.started):  # what a launch left that was cut off, the start looks into
        raise taken(paths, systemd.unit_of(paths.unit))
    _refuse_missing_gpus(request["gpus"])
    version_of_systemd = systemd_version()
    os.makedirs(os.path.join(root, "runs"), exist_ok=True)
    space = os.statvfs(root)
    free = space.f_bavail * space.f_frsize
    if free < MIN_FREE:
        raise Refusal(CONFIGURATION, "the disk of %s is full (%d MiB are free)" % (root, free >> 20), _FREE, "disk")
    if space.f_files and not space.f_favail:
        raise Refusal(CONFIGURATION, "the disk of %s has no inodes left" % root, _FREE, "disk")
    version = None
    missing = request["locked"] and not os.path.exists(request["python"])
    if not missing:
        version = interpreter_version(request["python"])
    return {
        "release": store.state_of(root, request["release"]),
        "python": version,
        "environment_missing": missing,
        "systemd": version_of_systemd,
        "free_bytes": free,
        "time": time.time(),
    }


_FREE = "free space there (`dflash gc` lists what can be removed)"


def taken(paths: RunPaths, unit: Dict[str, str]) -> Refusal:
    """A name is used once: there is, or was, a run of it."""
    state = unit.get("ActiveState") if unit.get("LoadState") not in (None, "not-found") else "ended"
    message = "the run %s is already there (%s)" % (paths.run, state)
    return Refusal(USAGE, message, "choose another name, or look: `dflash status %s`" % paths.run, "taken")


def _refuse_missing_gpus(wanted: List[int]) -> None:
    """CUDA sees no GPU without its device node: more cannot be had, whatever nvidia-smi says or fails to say."""
    there = sum(bool(_GPU_NODE.match(node)) for node in glob.glob("/dev/nvidia*"))
    if wanted and max(wanted) >= there:
        numbers = ", ".join(str(index) for index in sorted(wanted))
        raise Refusal(
            CONFIGURATION,
            "the run wants GPU %s and the container has %s" % (numbers, "%d" % there if there else "none"),
            "`dflash doctor` says what the container lacks; `gpus` of the job names others",
            "no-gpu",
        )


def systemd_version() -> int:
    """The version of the systemd that is PID 1. Raises Refusal when it is another init or too old."""
    if not os.path.isdir("/run/systemd/system"):
        raise Refusal(
            CONFIGURATION, "systemd is not PID 1 in the container", "use a container template with systemd (Debian)"
        )
    done = process.call(["systemctl", "--version"], 10)
    words = done.stdout.split()
    if done.status != 0 or len(words) < 2 or not words[1].isdigit():
        raise Refusal(TEMPORARY, "systemctl did not answer: %s" % (done.error or done.stderr.strip()), "try again")
    version = int(words[1])
    if version < MIN_SYSTEMD:
        raise Refusal(CONFIGURATION, "systemd %d is too old (%d is needed)" % (version, MIN_SYSTEMD), "upgrade it")
    return version


def interpreter_version(python: str) -> str:
    """`3.11.2`. Raises Refusal when the interpreter does not run."""
    if not os.path.exists(python):
        raise Refusal(
            CONFIGURATION,
            "there is no %s in the container" % python,
            "correct `python` of the environment",
            "no-python",
        )
    done = process.call([python, "-I", "-S", "-c", _ASK], 20)
    try:
        (major, minor, micro), _ = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [done.error or "it said nothing"])[-1]
        raise Refusal(CONFIGURATION, "%s in the container does not run: %s" % (python, last), "", "no-python") from None
    if (major, minor) < (3, 11):
        raise Refusal(
            CONFIGURATION,
            "%s is Python %d.%d; the trainer needs 3.11 or newer" % (python, major, minor),
            "name another in `python` of the environment",
        )
    return "%d.%d.%d" % (major, minor, micro)
