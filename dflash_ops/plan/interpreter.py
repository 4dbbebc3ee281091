"""Finds the interpreter that runs the trainer: one that is there, or one that is built from a lock file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.models import EnvironmentEntry, Inventory
from dflash_ops.run.record import RootPaths


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Where the environment's Python is in the container. With `lock`, the hash in its path, dflash builds it."""

    environment: str
    path: str
    lock: str | None = None
    lock_text: str = field(default="", repr=False)
    python: str = ""  # what a locked environment is built with: a version or a path


def interpreter(inventory: Inventory, name: str | None, paths: RootPaths) -> Interpreter:
    """The interpreter of an environment. Raises UsageError, ConfigurationError."""
    key, entry = inventory.environment(name)
    if entry.lock is None:
        return Interpreter(key, str(inventory.resolve_python(entry.python)))
    text = _read_lock(inventory, key, entry)
    digest = hashlib.sha256(f"{entry.python}\n{text}".encode()).hexdigest()[:32]
    return Interpreter(key, f"{paths.environments}/{digest}/bin/python", digest, text, entry.python)


def _read_lock(inventory: Inventory, key: str, entry: EnvironmentEntry) -> str:
    assert entry.lock is not None
    path = inventory.resolve(entry.lock)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read the lock file {path} of environment {key}: {error}", f"correct `lock` in {inventory.path}"
        ) from error
