"""Reads what is kept of two runs, and sends the files in which their releases differ."""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional

from dflash_ops.remote import files, protocol, status, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import RunPaths
from dflash_ops.remote.protocol import DiffAnswer, DiffRequest, KeptRun

_LARGEST = 512 * 1024  # bytes of a file that is shown
_MOST = 3 * 1024 * 1024  # bytes of all of them: a frame has a limit


def main(request: DiffRequest, channel: Channel) -> DiffAnswer:
    """What is kept of both runs, and the texts of the files that differ."""
    runs = [which.find_run(request["root"], name) for name in request["runs"]]
    kept = [_kept(paths) for paths in runs]
    return {"runs": kept, "files": _differing(request["root"], kept)}


def _kept(paths: RunPaths) -> KeptRun:
    spec = files.read_json(paths.spec)
    if spec is None:
        raise Refusal(protocol.CONFIGURATION, "the run %s has no spec.json that can be read" % paths.run)
    return {
        "run": paths.run,
        "spec": spec,
        "facts": files.read_json(paths.facts),
        "data": _data_hash(paths),
    }


def _data_hash(paths: RunPaths) -> Optional[str]:
    """The hash of the rows that the run trained on: in its checkpoints, and in the log before there is one."""
    for found in reversed(status.checkpoints_of(paths.checkpoints)):
        folder = os.path.join(paths.checkpoints, found["name"])
        value = (files.read_json(os.path.join(folder, "run.json")) or {}).get("content_hash")
        if isinstance(value, str):
            return value
    try:
        with open(paths.log, "rb") as stream:
            match = re.search(rb"; rows ([0-9a-f]{16,64})$", stream.read(256 * 1024), re.M)
    except OSError:
        return None
    return match.group(1).decode("ascii") if match else None


def _differing(root: str, kept: List[KeptRun]) -> Dict[str, List[Optional[str]]]:
    names = [str(one["spec"].get("release")) for one in kept]
    if names[0] == names[1] or not all(re.match(r"[0-9a-f]{32}\Z", name) for name in names):
        return {}
    folders = [os.path.join(files.checked_root(root), "releases", name) for name in names]
    texts = [_texts(folder) for folder in folders]
    differing: Dict[str, List[Optional[str]]] = {}
    left = _MOST
    for path in sorted(set(texts[0]) | set(texts[1])):
        pair = [texts[0].get(path), texts[1].get(path)]
        if pair[0] != pair[1]:
            left -= sum(len(text) for text in pair if text)
            differing[path] = pair if left > 0 else ["(too much to show)\n", "(too much to show, and different)\n"]
    return differing


def _texts(folder: str) -> Dict[str, str]:
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(parent, name)
            if os.path.islink(path) or os.path.getsize(path) > _LARGEST or name.startswith("."):
                continue
            with open(path, "rb") as stream:
                found[os.path.relpath(path, folder)] = stream.read().decode("utf-8", "backslashreplace")
    return found
