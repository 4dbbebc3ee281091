"""Stores files in the container: whole and verified, by a rename at the end, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from typing import Any, Dict, List, Optional

from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.files import checked_root, fsync_directory, locked, read_json, write_json
from dflash_ops.remote.protocol import CONFIGURATION, TEMPORARY, StoredFile, StoreRequest

MANIFEST = ".manifest.json"
# What is stored where: <root>/<shelf>/<name>/<folder>/...
SHELVES = {"releases": "trainer", "wheels": "wheels"}
_NAME = re.compile(r"[0-9a-f]{32}\Z")
_STALE_SECONDS = 24 * 3600  # an upload that is older was cut off by something that left it no time to clean up


def main(request: StoreRequest, channel: Channel) -> Dict[str, Any]:
    """Store a folder from the payload.

    The payload is all contents in the order of `files`, the manifest.
    """
    root, shelf, name, files = request["root"], request["shelf"], request["name"], request["files"]
    base = os.path.join(checked_root(root), shelf)
    _check(name, files)
    os.makedirs(base, exist_ok=True)
    _sweep(base)
    if state_of(root, name, shelf) == "present":
        return {"state": "present"}
    temporary = os.path.join(base, "%s.tmp-%d-%d" % (name, os.getpid(), time.time_ns()))
    try:
        os.mkdir(temporary)
        for entry in files:
            _receive(channel, os.path.join(temporary, SHELVES[shelf]), entry)
        write_json(os.path.join(temporary, MANIFEST), {"files": files})
        for folder, _, _ in os.walk(temporary):
            fsync_directory(folder)
        _put_in_place(root, shelf, name, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(base)
    return {"state": "stored", "bytes": sum(entry["size"] for entry in files)}


def state_of(root: str, name: str, shelf: str = "releases") -> str:
    """`present` (every file was read and is right), `missing`, or `damaged`."""
    if not _NAME.match(name):
        raise Refusal(CONFIGURATION, "%r is not the name of a stored folder" % name)
    folder = os.path.join(checked_root(root), shelf, name)
    if not os.path.isdir(folder):
        return "missing"
    manifest = read_json(os.path.join(folder, MANIFEST))
    try:
        files = manifest["files"]  # type: ignore[index]
        _check(name, files)
        expected = {entry["path"] for entry in files}
        found = set()
        package = os.path.join(folder, SHELVES[shelf])
        for here, folders, names in os.walk(package):
            folders[:] = [each for each in folders if each != "__pycache__"]
            found |= {os.path.relpath(os.path.join(here, each), package) for each in names}
        if found != expected:
            return "damaged"
        for entry in files:
            if _hash(os.path.join(package, entry["path"])) != entry["sha256"]:
                return "damaged"
    except (Refusal, OSError, TypeError, KeyError):
        return "damaged"
    return "present"


def _check(name: str, files: List[StoredFile]) -> None:
    """Refuse a manifest that does not have this name, or that would write elsewhere."""
    digest = hashlib.sha256()
    for entry in files:
        path = entry["path"]
        parts = path.split("/")
        if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise Refusal(CONFIGURATION, "nothing can be stored at the path %r" % path)
        mode = bool(entry["executable"]) + 2 * bool(entry.get("private"))  # older manifests do not tell
        line = "%s %d %d %s\n" % (entry["sha256"], mode, entry["size"], path)
        digest.update(line.encode("utf-8"))
    if not _NAME.match(name) or digest.hexdigest()[:32] != name:
        raise Refusal(CONFIGURATION, "the manifest is not that of %s" % name)


def _receive(channel: Channel, package: str, entry: StoredFile) -> None:
    """One file from the payload, durable. Raises Refusal when the payload ends early or is not what was announced."""
    path = os.path.join(package, entry["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    digest = hashlib.sha256()
    left = entry["size"]
    with open(path, "wb") as stream:
        while left:
            chunk = channel.payload.read(min(left, 1 << 18))
            if not chunk:
                raise Refusal(TEMPORARY, "the upload was cut off", "try again", "cut-off")
            digest.update(chunk)
            stream.write(chunk)
            left -= len(chunk)
        stream.flush()
        mode = 0o755 if entry["executable"] else 0o644
        os.fchmod(stream.fileno(), mode & 0o700 if entry.get("private") else mode)
        os.fsync(stream.fileno())
    if digest.hexdigest() != entry["sha256"]:
        raise Refusal(TEMPORARY, "%s arrived changed" % entry["path"], "try again", "changed")


def _put_in_place(root: str, shelf: str, name: str, temporary: str) -> None:
    final = os.path.join(checked_root(root), shelf, name)
    with locked(os.path.join(root, shelf, ".lock"), 30):
        state = state_of(root, name, shelf)
        if state == "present":  # somebody else stored the same one meanwhile
            shutil.rmtree(temporary, ignore_errors=True)
            return
        if state == "damaged":
            # Running trainers may still read from the old folder; gc removes it later.
            os.rename(final, "%s.damaged-%d" % (final, time.time_ns()))
        os.rename(temporary, final)


def _sweep(base: str) -> None:
    """Remove uploads that were cut off long ago."""
    for entry in os.scandir(base):
        if ".tmp-" in entry.name:
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _hash(path: str) -> Optional[str]:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while True:
            chunk = stream.read(1 << 18)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)
