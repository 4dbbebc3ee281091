"""Sends a run's files, from the byte where the laptop's copies end, with their hashes.

`env` never leaves the container: it holds the run's secrets.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

from dflash_ops.remote import status, systemd, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import CONFIGURATION, TEMPORARY, PullRequest

CHUNK = 512 * 1024
_SECRET = ("env",)
_TEXT = (".jsonl", ".json", ".yaml", "log", ".md", ".txt")


def main(request: PullRequest, channel: Channel) -> Dict[str, Any]:
    """Send files.

    request: `root`; `run` or null; `what`: checkpoints, metrics, log, all or report; `have` {path: bytes already
    there}; `kept` {checkpoint: sha256 of its manifest} of those that are there in whole. Events: {run}; {plan: [[path,
    size]], kept}; then for each file {begin: path, offset}, {size, packed} with data (zlib's if packed)…, {end: path,
    sha256, size} or {vanished: path}. Result: {}. Raises Refusal when there is nothing.
    """
    paths = which.find_run(request["root"], request.get("run"))
    kept = _kept(paths, request["kept"])
    plan = [(path, size) for path, size in _wanted(paths, request["what"]) if _checkpoint_of(path) not in kept]
    if not (plan or kept):
        raise _nothing(paths, request["what"])
    channel.event(run=paths.run)
    channel.event(plan=[list(entry) for entry in plan], kept=sorted(kept))
    for path, size in plan:
        _send(paths, path, size, int(request["have"].get(path, 0)), channel)
    return {}


def _nothing(paths: RunPaths, what: str) -> Refusal:
    """There is nothing to send, yet or for good."""
    thing = {"checkpoints": "checkpoint", "all": "files"}.get(what, what)
    if systemd.is_over(systemd.unit_of(paths.unit)):
        message = "the run %s has ended and left no %s" % (paths.run, thing)
        return Refusal(CONFIGURATION, message, "`dflash status %s` says how it went" % paths.run, "nothing")
    hint = "`dflash checkpoint %s` makes one now" if thing == "checkpoint" else "`dflash status %s` says how far it is"
    return Refusal(TEMPORARY, "the run %s has no %s yet" % (paths.run, thing), hint % paths.run, "nothing")


def _checkpoint_of(path: str) -> Optional[str]:
    parts = path.split("/")
    return parts[1] if parts[0] == "checkpoints" and len(parts) > 2 else None


def _kept(paths: RunPaths, kept: Dict[str, str]) -> List[str]:
    """Those of the laptop's whole checkpoints whose manifest is the same here."""
    same = []
    for found in status.checkpoints_of(paths.checkpoints):
        if found["name"] in kept:
            with open(os.path.join(paths.checkpoints, found["name"], "manifest.json"), "rb") as stream:
                if hashlib.sha256(stream.read()).hexdigest() == kept[found["name"]]:
                    same.append(found["name"])
    return same


def _wanted(paths: RunPaths, what: str) -> Iterator[Tuple[str, int]]:
    """(path below the run's directory, size now): what is being written still grows, and is sent up to here."""
    if what == "report":
        evaluations = sorted(
            name for name in os.listdir(paths.directory) if name.startswith("eval") and name.endswith(".json")
        )
        yield from _existing(paths, ["metrics.jsonl", "compile.json", "spec.json", "facts.json"] + evaluations)
    if what in ("metrics", "all"):
        yield from _existing(paths, ["metrics.jsonl", "compile.json"])
    if what in ("log", "all"):
        yield from _existing(paths, ["log"])
    if what in ("checkpoints", "all"):
        for found in reversed(status.checkpoints_of(paths.checkpoints)):  # the newest is the most wanted
            yield from _tree(paths, os.path.join("checkpoints", found["name"]))
    if what == "all":
        for name in sorted(os.listdir(paths.directory)):
            if name in _SECRET or ".tmp" in name or name in ("metrics.jsonl", "compile.json", "log", "checkpoints"):
                continue
            if os.path.isdir(os.path.join(paths.directory, name)):
                yield from _tree(paths, name)
            else:
                yield from _existing(paths, [name])


def _existing(paths: RunPaths, names: List[str]) -> Iterator[Tuple[str, int]]:
    for name in names:
        path = os.path.join(paths.directory, name)
        if os.path.isfile(path) and not os.path.islink(path):
            yield name, os.path.getsize(path)


def _tree(paths: RunPaths, folder: str) -> Iterator[Tuple[str, int]]:
    for parent, folders, names in os.walk(os.path.join(paths.directory, folder)):
        folders.sort()
        yield from _existing(
            paths, [os.path.relpath(os.path.join(parent, name), paths.directory) for name in sorted(names)]
        )


def _send(paths: RunPaths, path: str, size: int, have: int, channel: Channel) -> None:
    try:
        handle = os.open(os.path.join(paths.directory, path), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        channel.event(vanished=path)  # the trainer keeps only its newest checkpoints
        return
    with os.fdopen(handle, "rb") as stream:
        digest = hashlib.sha256()
        offset = have if have <= size else 0
        left = offset
        while left:
            data = stream.read(min(CHUNK, left))
            if not data:
                break
            digest.update(data)
            left -= len(data)
            channel.beat()
        channel.event(begin=path, offset=offset)
        left = size - offset
        packed = path.endswith(_TEXT)
        while left:
            data = stream.read(min(CHUNK, left))
            if not data:
                channel.event(vanished=path)  # it was cut short
                return
            digest.update(data)
            left -= len(data)
            body = zlib.compress(data, 1) if packed else data
            channel.event(body, size=len(data), packed=packed)
        channel.event(end=path, sha256=digest.hexdigest(), size=size)
