"""Checks a job's configuration by the trainer's own model before anything is sent.

Errors name the user's own file and line, or the --set that is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.load import Lines, first_problem, read_yaml, unknown_key
from dflash_ops.inventory.models import Inventory, JobEntry

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]
_EXPLAIN = "`python -m trainer config --explain` says what may stand there"


def check_job(
    config: Mapping[str, Any], inventory: Inventory, name: str, job: JobEntry, changes: Sequence[str]
) -> None:
    """Check the merged configuration of a job. Raises ConfigurationError naming the user's own file and line."""

    def place(where: Location) -> str:
        listed, lines = _read(inventory.path)
        for key in reversed(job.set):
            if _concerns(key, where):
                return f"{listed}:{lines.get(('jobs', name, 'set', key), 1)}: `set` of job {name}"
        if job.gpus is not None and where[:1] == ("pipeline",) and where[1:2] in (("targets",), ("drafters",)):
            return f"{listed}:{lines.get(('jobs', name, 'gpus'), 1)}: `gpus` of job {name}"
        if isinstance(job.config, Path):
            file = inventory.resolve(job.config)
            return f"{file}:{_deepest(_read(file)[1], where)}"
        return f"{listed}:{_deepest(lines, ('jobs', name, 'config', *where))}"

    check(config, changes, place)


def check(config: Mapping[str, Any], changes: Sequence[str], place: Callable[[Location], str]) -> None:
    """Check a configuration; `place` says where a part comes from that no --set of `changes` gave."""
    from trainer.config import RunConfig

    try:
        RunConfig.model_validate(config)
    except ValidationError as error:
        first = first_problem(error)
        where = first["loc"] if first["type"] == "missing" else tuple(_existing(config, first["loc"]))
        given = next(
            (key for key in (text.partition("=")[0] for text in reversed(changes)) if _concerns(key, where)), ""
        )
        raise _explained(f"--set {given}" if given else place(where), first, where, RunConfig) from error


def _read(path: Path) -> tuple[Path, Lines]:
    return path, read_yaml(path.read_bytes(), path)[1]


def _existing(config: Any, location: Location) -> Iterator[str | int]:
    """The keys of a location: behind a field that may be of several types pydantic appends the type that it tried."""
    for part in location:
        try:
            config = config[part]
        except (LookupError, TypeError):
            return
        yield part


def _concerns(key: str, where: Location) -> bool:
    """Whether `key` set what stands at `where`, or a part of it."""
    parts = tuple(key.split("."))
    shorter = min(len(parts), len(where))
    return bool(where) and parts[:shorter] == where[:shorter]


def _deepest(lines: Lines, where: Location) -> int:
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 1)


def _explained(place: str, problem: ErrorDetails, where: Location, model: type[BaseModel]) -> ConfigurationError:
    name = ".".join(map(str, where))
    if problem["type"] == "extra_forbidden":
        from trainer.config import RENAMED_KEYS

        if name in RENAMED_KEYS:
            return ConfigurationError(f"{place}: unknown key `{name}`", f"it is now called `{RENAMED_KEYS[name]}`")
        return unknown_key(place, name, str(where[-1]), _keys(model, where[:-1]))
    if problem["type"] == "missing":
        return ConfigurationError(f"{place}: the configuration has no `{name}`", f"add it; {_EXPLAIN}")
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    shown = f" (it is {value!r})" if isinstance(value, str | int | float) or value is None else ""
    return ConfigurationError(f"{place}: `{name}`: {message[:1].lower()}{message[1:]}{shown}", _EXPLAIN)


def _keys(model: type[BaseModel], where: Location) -> list[str]:
    for part in where:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return []
        model = field.annotation
    return list(model.model_fields)
