"""Keeps on the laptop what was last known of each run, one file per container.

Containers of two inventories may have the same name: they are told apart by the inventory's path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

_KEPT = 50  # runs a container


class Seen(BaseModel):
    """A verdict and when this laptop got it, by this laptop's clock."""

    model_config = ConfigDict(frozen=True)

    run: str
    state: str
    reason: str
    time: float


def _file(inventory: Path, container: str) -> Path:
    which = hashlib.sha256(os.fsencode(inventory.resolve())).hexdigest()[:12]
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dflash" / "seen" / f"{container}-{which}.json"


def last_seen(inventory: Path, container: str, run: str | None) -> Seen | None:
    """The last verdict of a run, or of the run that was asked about last."""
    try:
        entries = [Seen.model_validate(entry) for entry in json.loads(_file(inventory, container).read_bytes())]
    except (OSError, ValueError, TypeError, ValidationError):
        return None
    return next((entry for entry in reversed(entries) if run is None or entry.run == run), None)


def names(inventory: Path, container: str) -> list[str]:
    """Runs that were asked about or launched from here, the newest first: what shell completion offers."""
    try:
        entries = [Seen.model_validate(entry) for entry in json.loads(_file(inventory, container).read_bytes())]
    except (OSError, ValueError, TypeError, ValidationError):
        return []
    return [entry.run for entry in reversed(entries)]


def remember(inventory: Path, container: str, run: str, state: str, reason: str) -> None:
    """Keep a verdict. A full or read-only disk here must not spoil an answer: then nothing is kept."""
    path = _file(inventory, container)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = []
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # a damaged file is written anew
            entries = [entry for entry in json.loads(path.read_bytes()) if entry.get("run") != run]
        entries.append({"run": run, "state": state, "reason": reason, "time": time.time()})
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
            json.dump(entries[-_KEPT:], stream)
        Path(stream.name).replace(path)
