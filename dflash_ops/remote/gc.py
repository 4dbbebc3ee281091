"""Finds and removes what no run uses; renames a folder away first, then deletes it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from typing import Iterator, List, Optional, Set

from dflash_ops.remote import files, systemd, which
from dflash_ops.remote.channel import Channel, PeerGone, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import CONFIGURATION, GcAnswer, GcItem, GcRequest

# A launch stores its release some time before its run exists.
_YOUNG_SECONDS = 3600
_KEY = "key.json"  # in each compile cache, by the trainer: what it was compiled with and for
_HASH = re.compile(r"[0-9a-f]{32}\Z")
_LEFT_OVER = re.compile(r"[0-9a-f]{32}\.(tmp|damaged)-|\.gone-")


def main(request: GcRequest, channel: Channel) -> GcAnswer:
    """List what may go, and remove it when `remove` holds its paths.

    Events: {removed}.
    """
    root = files.checked_root(request["root"])
    removed: List[str] = []
    if request["remove"] is None or not os.path.isdir(root):
        return {"items": list(_removable(root, request, channel)), "removed": removed}
    agreed = set(request["remove"])
    with files.locked(os.path.join(root, "launch.lock"), 60):
        channel.pause(0)  # a removal that was given up must not happen later
        # Looked at anew under the lock of launches: what a run has begun to use since then stays.
        items = [item for item in _removable(root, request, channel) if item["path"] in agreed]
        gone = [_set_aside(item["path"]) for item in items]
    for item, aside in zip(items, gone):
        if aside is not None:
            _delete(aside)
            removed.append(item["path"])
            channel.event(removed=item["path"])
    return {"items": items, "removed": removed}


def _removable(root: str, request: GcRequest, channel: Channel) -> Iterator[GcItem]:
    runs = files.run_names(root)
    live = _live(root, runs)
    ended = [run for run in runs if run not in live]
    now = time.time()
    resumed = {_resumed_from(root, run) for run in live}
    old = [
        run
        for run in ended[int(request["keep"]) :]
        if now - _ended_at(RunPaths(root, run)) >= float(request["older_than"]) and run not in resumed
    ]
    for run in old:
        paths = RunPaths(root, run)
        yield _item(paths.directory, "run", "ended %s ago" % _age(now - _ended_at(paths)), channel)
    staying = [run for run in runs if run not in old]
    specs = [files.read_json(RunPaths(root, run).spec) or {} for run in staying]
    foreign = which.used_by(which.elsewhere(root))
    for folder, key, kind in (("releases", "release", "release"), ("env", "lock", "environment")):
        used = {str(spec.get(key)) for spec in specs} | foreign
        for path, name, age in _entries(os.path.join(root, folder), now):
            if _LEFT_OVER.match(name) and age > _YOUNG_SECONDS:
                yield _item(path, "leftover", "of something that was cut off", channel)
            elif _HASH.match(name) and name not in used and age > _YOUNG_SECONDS:
                yield _item(path, kind, "no run uses it", channel)
    for path, _, age in _entries(os.path.join(root, "wheels"), now):
        if age > _YOUNG_SECONDS:
            yield _item(path, "leftover", "wheels of a build", channel)
    for folder in ("runs", "cache", "cache/compile"):
        for path, name, _ in _entries(os.path.join(root, folder), now):
            if name.startswith(".gone-"):
                yield _item(path, "leftover", "of a removal that was cut off", channel)
    for path, age in _compile_caches(root, live, now):
        if request["caches"] or age >= float(request["older_than"]):
            yield _item(path, "cache", "%s, last used %s ago" % (_made_for(path), _age(age)), channel)
    if request["caches"] and not live:
        for name in ("uv", "pycache"):
            path = os.path.join(root, "cache", name)
            if os.path.isdir(path):
                yield _item(path, "cache", "it is built anew when needed", channel)


def _compile_caches(root: str, live: Set[str], now: float) -> "Iterator[tuple[str, float]]":
    """The compile caches that no live run uses: path, seconds since a run last took it up."""
    used: Set[str] = set()
    for run in live:
        folders = _compiled_into(RunPaths(root, run))
        if folders is None:  # it has not compiled yet, so it may be about to use any
            return
        used |= folders
    for path, name, age in _entries(os.path.join(root, "cache", "compile"), now):
        if os.path.realpath(path) not in used and not name.startswith(".gone-"):
            with contextlib.suppress(OSError):
                age = now - os.stat(os.path.join(path, _KEY)).st_mtime  # written anew at each use
            yield path, age


def _compiled_into(paths: RunPaths) -> Optional[Set[str]]:
    """The compile caches of a run that is past its compilation; None when it is not known to be."""
    try:
        with open(paths.compile, "rb") as stream:
            return {os.path.realpath(str(report.get("cache_directory"))) for report in json.load(stream)}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _made_for(path: str) -> str:
    """What a compile cache's key says that it is for."""
    key = files.read_json(os.path.join(path, _KEY)) or {}
    return "torch %s on %s" % tuple(str(key.get(name, "?"))[:80] for name in ("torch", "gpu"))


def _item(path: str, kind: str, why: str, channel: Channel) -> GcItem:
    size = files.tree_bytes(path)
    with contextlib.suppress(PeerGone):
        channel.beat()
    return {"path": path, "kind": kind, "bytes": size, "why": why}


def _entries(base: str, now: float) -> "Iterator[tuple[str, str, float]]":
    """Folders in a folder: path, name, seconds since it changed."""
    try:
        entries = sorted(os.scandir(base), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                yield entry.path, entry.name, now - entry.stat(follow_symlinks=False).st_mtime


def _live(root: str, runs: List[str]) -> Set[str]:
    """Runs that may still be running: what systemd does not deny counts. Raises Refusal when it does not answer."""
    open_runs = [run for run in runs if not os.path.exists(RunPaths(root, run).exit)]
    shown = systemd.show_units([RunPaths(root, run).unit for run in open_runs])
    live = set()
    for run in open_runs:
        if not systemd.is_over(shown.get(RunPaths(root, run).unit, {})):
            live.add(run)
    return live


def _resumed_from(root: str, run: str) -> Optional[str]:
    """The run whose checkpoint a run began with."""
    source = (files.read_json(RunPaths(root, run).spec) or {}).get("resumed_from")
    prefix = os.path.join(root, "runs") + "/"
    return source[len(prefix) :].split("/")[0] if isinstance(source, str) and source.startswith(prefix) else None


def _ended_at(paths: RunPaths) -> float:
    times = [0.0]
    for path in (paths.exit, paths.log, paths.started, paths.directory):
        with contextlib.suppress(OSError):
            times.append(os.stat(path).st_mtime)
    return max(times)


def _age(seconds: float) -> str:
    """`3 days`, `1 hour`, `less than a minute`."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        many = int(seconds // size)
        if many > 0:
            return "%d %s%s" % (many, unit, "" if many == 1 else "s")
    return "less than a minute"


def _set_aside(path: str) -> Optional[str]:
    """Rename out of sight: from then on nobody can begin to use it, and deleting may take its time."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, ".gone-%d-%s" % (time.time_ns(), name))
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    return aside


def _delete(path: str) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise Refusal(CONFIGURATION, "cannot delete %s: %s" % (error.filename, error.strerror)) from error
