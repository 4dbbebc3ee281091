"""Merges the trainer's configuration: the job's, its GPUs, its `set`, then --set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.inventory.load import read_yaml
from dflash_ops.inventory.models import GpuEntry, Inventory, JobEntry
from trainer.core_schema import CoreDumper, read_value


def job_config(inventory: Inventory, name: str, job: JobEntry, changes: tuple[str, ...]) -> dict[str, Any]:
    """The trainer's configuration: the job's, its GPUs, its `set`, then --set. The last word wins."""
    given: Any = job.config
    if isinstance(given, Path):
        path = inventory.resolve(given)
        try:
            given, _ = read_yaml(path.read_bytes(), path)
        except OSError as error:
            raise ConfigurationError(
                f"cannot read the configuration {path} of job {name}: {error.strerror}", "correct `config` of the job"
            ) from error
        if not isinstance(given, dict):
            raise ConfigurationError(f"{path}:1: the configuration must be a mapping", "begin with `target:`")
    config: dict[str, Any] = _copied(given)
    if job.gpus is not None:
        _set_gpus(config, job.gpus)
    for key, value in job.set.items():
        set_dotted(config, key, value)
    odd = _not_plain(config)
    if odd:
        raise ConfigurationError(f"the configuration of job {name} cannot hold {odd}", "put it in quotes to mean text")
    return changed(config, changes)


def changed(given: Mapping[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """A configuration with the changes of --set made. Raises UsageError."""
    config: dict[str, Any] = _copied(given)
    for change in changes:
        key, found, text = change.partition("=")
        if not found:
            raise UsageError(f"--set {change!r} has no `=`", "write --set optimizer.lr=1e-4")
        set_dotted(config, key, parse_value(text, key))
    return config


def _not_plain(value: Any, where: str = "") -> str:
    """What of a configuration is neither text, number, truth value nor null, in words: YAML also has dates and sets."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"the key {key!r}{' in `' + where + '`' if where else ''}, which is no text"
            found = _not_plain(item, f"{where}.{key}" if where else key)
            if found:
                return found
    elif isinstance(value, list):
        return next(filter(None, (_not_plain(item, where) for item in value)), "")
    elif not (value is None or isinstance(value, str | int | float)):
        return f"a {type(value).__name__} as `{where}`"
    return ""


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _set_gpus(config: dict[str, Any], gpus: GpuEntry) -> None:
    for role, indices in (("targets", gpus.target), ("drafters", gpus.drafters)):
        if indices:
            set_dotted(config, f"pipeline.{role}", [f"cuda:{index}" for index in indices])


def set_dotted(config: dict[str, Any], key: str, value: Any) -> None:
    """`optimizer.lr` in nested mappings, made where they are missing. Raises UsageError."""
    parts = key.split(".")
    if not all(parts) or not key.isprintable():
        raise UsageError(f"{key!r} is no key of the configuration", "write it like optimizer.lr")
    here = config
    for depth, part in enumerate(parts[:-1]):
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f"`{'.'.join(parts[: depth + 1])}` is a value, not a section: {key!r} cannot be set in it")
        here = inner
    here[parts[-1]] = value


def parse_value(text: str, key: str) -> Any:
    """A value as YAML 1.2's core schema reads it. Raises UsageError."""
    try:
        value = read_value(text)
        odd = _not_plain(value, key)
    except ValueError as error:
        raise UsageError(f"--set {key}: {error}", "give another value") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"the value of --set {key} is not YAML", "put text with special characters in quotes"
        ) from error
    if odd:
        raise UsageError(f"the configuration cannot hold {odd}", f"write --set '{key}=\"{text}\"' to mean text")
    return value


def dump_yaml(config: Mapping[str, Any]) -> str:
    """YAML that reads back as the same values, by YAML 1.2 and, where a job's own code reads it so, by YAML 1.1."""
    # Escapes instead of characters beyond ASCII: PyYAML writes some of these in a way that it does not read back.
    return yaml.dump(dict(config), Dumper=CoreDumper, sort_keys=False, width=120)
