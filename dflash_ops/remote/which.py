"""Finds the run that a request means, and the runs that systemd runs, whatever root folder they are of."""

from __future__ import annotations

import contextlib
import os
import re
from typing import List, NamedTuple, Optional, Set

from dflash_ops.remote import files, process, systemd
from dflash_ops.remote.channel import Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import RUN_NOT_FOUND, TEMPORARY, USAGE

_PROPERTIES = "Id,LoadState,ActiveState,Description,ExecStart,MainPID"
_UNIT = re.compile(r"dflash-([a-z0-9][a-z0-9-]{0,62})\.service\Z")
_GPUS = re.compile(r" on GPU ([0-9,]+)\Z")  # as `dflash_ops.plan.unit` describes a unit


class LiveRun(NamedTuple):
    """A run whose unit lives."""

    run: str
    unit: str
    directory: str  # empty where systemd does not say
    gpus: Set[int]
    pid: int


def live_runs() -> List[LiveRun]:
    """The runs whose units live in this container. Raises Refusal when systemd does not answer."""
    command = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "dflash-*.service"]
    done = process.call(command, 10)
    if done.status != 0:
        why = done.error or (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Refusal(TEMPORARY, "systemd in the container did not answer: %s" % why, reason="systemd")
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    found = []
    shown = systemd.show_units([name for name in names if _UNIT.match(name)], properties=_PROPERTIES)
    for unit, properties in sorted(shown.items()):
        match = _UNIT.match(unit)
        if match and not systemd.is_over(properties):
            entry = re.search(r"path=(\S+)", properties.get("ExecStart", ""))
            directory = os.path.dirname(entry.group(1)) if entry else ""
            pid = properties.get("MainPID", "0")
            found.append(
                LiveRun(match.group(1), unit, directory, _gpus(properties, directory), int(pid) if pid.isdigit() else 0)
            )
    return found


def _gpus(properties: "dict[str, str]", directory: str) -> Set[int]:
    """The GPUs that a unit holds, by its own description; of an older one by its spec, if that still stands there."""
    described = _GPUS.search(properties.get("Description", ""))
    if described:
        return {int(number) for number in described.group(1).split(",") if number}
    spec = files.read_json(os.path.join(directory, "spec.json")) if directory else None
    held = (spec or {}).get("gpus") or {}
    return {int(index) for role in ("target", "drafters") for index in held.get(role) or []}


def elsewhere(root: str) -> List[LiveRun]:
    """The live runs whose directories are not in this root folder, or were moved out of it."""
    base = os.path.realpath(os.path.join(files.checked_root(root), "runs"))

    def at_home(one: LiveRun) -> bool:
        return os.path.isdir(one.directory) and os.path.realpath(os.path.dirname(one.directory)) == base

    return [one for one in live_runs() if not at_home(one)]


def used_by(runs: List[LiveRun]) -> Set[str]:
    """Names of the releases and environments that these runs' processes work in and run from."""
    names: Set[str] = set()
    for one in runs:
        for link in ("cwd", "exe"):
            with contextlib.suppress(OSError):
                names.update(os.readlink("/proc/%d/%s" % (one.pid, link)).split("/"))
    return names


def find_run(root: str, run: Optional[str], changing: bool = False) -> RunPaths:
    """The named run; for None the one that runs, else the newest.

    Args:
        changing: the request changes something, so that of several live runs none is taken by guess.

    Raises:
        Refusal: there is no such run, or which one is meant is not clear.
    """
    if run is None:
        return RunPaths(root, _unnamed(root, changing))
    paths = RunPaths(root, run)
    if not os.path.isdir(paths.directory):
        try:
            live = live_runs()
        except Refusal:
            live = []  # without systemd nobody knows of other places
        for one in live:
            if one.run == run:
                message = "the run %s runs, but not in %s: its unit began in %s" % (run, root, one.directory or "?")
                cure = "give the container that `root`, or look with `systemctl status %s` in it" % one.unit
                raise Refusal(RUN_NOT_FOUND, message, cure, "elsewhere")
        raise Refusal(RUN_NOT_FOUND, "there is no run %s" % paths.run, "`dflash runs` lists them", "no-run")
    return paths


def _unnamed(root: str, changing: bool) -> str:
    names = files.run_names(root)
    if not names:
        raise Refusal(RUN_NOT_FOUND, "there is no run in %s" % root, "start one with `dflash launch`", "no-run")
    unfinished = [name for name in names if not os.path.exists(RunPaths(root, name).exit)]
    try:
        shown = systemd.show_units([RunPaths(root, name).unit for name in unfinished])
    except Refusal:
        return names[0]  # the answer will say that systemd does not
    live = [name for name in unfinished if not systemd.is_over(shown.get(RunPaths(root, name).unit, {}))]
    if changing and len(live) > 1:
        raise Refusal(USAGE, "several runs are live: %s" % ", ".join(sorted(live)), "name the one that you mean")
    return (live or names)[0]
