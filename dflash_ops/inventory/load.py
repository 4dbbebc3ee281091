"""Reads and checks inventory.yaml; errors name file, line and cure."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import (
    ValidationError,
)

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.models import (
    ContainerEntry,
    Entry,
    EnvironmentEntry,
    GpuEntry,
    HostEntry,
    Inventory,
    JobEntry,
    listed,
)
from trainer.core_schema import CoreLoader, as_text, not_finite

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# What stands here is text or an id, whatever it looks like: `0755`, `3.10` and `no` are kept as they were typed.
_KEPT_AS_TEXT: tuple[tuple[str, ...], ...] = (
    ("containers", "*", "container"),
    ("environments", "*", "python"),
    ("jobs", "*", "env", "*"),
    ("jobs", "*", "gpus", "*"),
    ("jobs", "*", "gpus", "*", "*"),
)
MAX_BYTES = 1024 * 1024
MAX_NODES = 100_000  # aliases of aliases multiply: a small file can be a huge tree


def inventory_path(given: Path | None) -> Path:
    """--inventory, else $DFLASH_INVENTORY, else ./inventory.yaml."""
    return given or Path(os.environ.get("DFLASH_INVENTORY") or "inventory.yaml")


def load_inventory(given: Path | None = None) -> Inventory:
    """Raises ConfigurationError naming file and line."""
    path = inventory_path(given)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the inventory {path}: {error.strerror}",
            "run dflash in the folder of inventory.yaml, or name the file by --inventory or DFLASH_INVENTORY",
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"the inventory {path} is larger than {MAX_BYTES >> 20} MiB", "is it the right file?")
    value, lines = read_yaml(data, path, _KEPT_AS_TEXT)
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}:1: the inventory must be a mapping", "begin with `containers:`")
    if "path" in value:
        raise ConfigurationError(f"{path}:{lines.get(('path',), 1)}: unknown key `path`", "remove it")
    try:
        inventory = Inventory.model_validate({**value, "path": path.absolute()})
    except ValidationError as error:
        raise _explained(error, path, lines) from error
    _check_references(inventory, path, lines)
    return inventory


Lines = dict[tuple[str | int, ...], int]


def read_yaml(data: bytes, path: Path, kept_as_text: Sequence[tuple[str, ...]] = ()) -> tuple[Any, Lines]:
    """A YAML document and the line of each of its keys and items. Raises ConfigurationError.

    Args:
        data: the document, whose scalars are read by YAML 1.2's core schema.
        path: named in errors.
        kept_as_text: where plain scalars stay the text that was typed; `*` is any key or index.
    """
    lines: Lines = {}
    try:
        loader = CoreLoader(data)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _mark(node, (), lines, path, [0])
            _keep_text(node, kept_as_text)
            _refuse_infinite(node, (), path)
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigurationError(f"{path}:{line}: {error.problem or error.context}", _yaml_cure(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{path}: it is not YAML: {reason}", "correct the file") from error


def _yaml_cure(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "write spaces instead of the tab, and indent like the line above"
    if problem.startswith("expected <block end>"):
        return "indent with spaces, like the line above"
    if problem.startswith(("mapping values are not allowed", "could not find expected ':'")):
        return "look at the line above too: is a colon missing, or the indent off? (text that holds `: ` needs quotes)"
    return "correct the YAML there"


def _mark(node: yaml.Node, where: tuple[str | int, ...], lines: Lines, path: Path, seen: list[int]) -> None:
    """Note lines; refuse duplicate keys, which YAML readers let win silently."""
    seen[0] += 1
    if seen[0] > MAX_NODES:
        raise ConfigurationError(f"{path}: the document has more than {MAX_NODES} nodes", "write out its aliases")
    lines.setdefault(where, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.value)
            line = key.start_mark.line + 1
            if name in keys and name != "<<":
                raise ConfigurationError(f"{path}:{line}: the key `{name}` stands twice", "remove one of them")
            keys.add(name)
            lines[(*where, name)] = line
            _mark(value, (*where, name), lines, path, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*where, index)] = value.start_mark.line + 1
            _mark(value, (*where, index), lines, path, seen)


def first_problem(error: ValidationError) -> ErrorDetails:
    """The one to tell. A misspelt key is also a missing one: the cause is told, not its effect."""
    return min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")


def unknown_key(place: str, dotted: str, key: str, known: list[str]) -> ConfigurationError:
    """A key that is not known, and the one that may be meant."""
    near = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
    return ConfigurationError(f"{place}: unknown key `{dotted}`", hint)


def _refuse_infinite(node: yaml.Node, where: tuple[str, ...], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _refuse_infinite(value, (*where, str(key.value)), path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_infinite(item, (*where, str(index)), path)
    elif not_finite(node):
        line = node.start_mark.line + 1
        what = f"`{'.'.join(where)}`: {node.value} is not a finite number"
        raise ConfigurationError(f"{path}:{line}: {what}", "correct it there")


def _keep_text(node: yaml.Node, places: Sequence[tuple[str, ...]]) -> None:
    """Turn the plain scalars at these places into text. A merged mapping (`<<`) stands where it is merged."""
    if not places:
        return
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    for index, (key, value) in enumerate(pairs):
        merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if key.tag == "tag:yaml.org,2002:merge":
            for each in merged:
                _keep_text(each, places)
            continue
        below = [place[1:] for place in places if place[0] in ("*", key.value)]
        if () in below:
            node.value[index] = (key, as_text(value))
        _keep_text(value, [place for place in below if place])
    if isinstance(node, yaml.SequenceNode):
        below = [place[1:] for place in places if place[0] == "*"]
        if () in below:
            node.value[:] = [as_text(item) for item in node.value]
        for item in node.value:
            _keep_text(item, [place for place in below if place])


def _explained(error: ValidationError, path: Path, lines: Lines) -> ConfigurationError:
    first = first_problem(error)
    loc = first["loc"]
    where: tuple[str | int, ...] = ()
    while len(where) < len(loc) and (*where, loc[len(where)]) in lines:
        where = (*where, loc[len(where)])
    dotted = ".".join(str(part) for part in where)
    line = lines.get(where, 1)
    if first["type"] == "extra_forbidden":
        new = _RENAMED.get(str(loc[-1])) if len(loc) == 1 or (loc[0] == "jobs" and len(loc) == 3) else None
        if new is not None:
            return ConfigurationError(f"{path}:{line}: `{dotted}` is now spelled `{new}`", f"write `{new}:` there")
        return unknown_key(f"{path}:{line}", dotted, str(loc[-1]), _known_keys(loc[:-1]))
    if first["type"] == "missing":
        place = f" in `{dotted}`" if dotted else ""
        return ConfigurationError(f"{path}:{line}: the key `{loc[-1]}` is missing{place}", "add it")
    message = first["msg"].removeprefix("Value error, ")
    return ConfigurationError(f"{path}:{line}: `{dotted}`: {message}", "correct it there")


# What stands under these keys is a container; `target` is the model.
_RENAMED = {"targets": "containers", "default_target": "default_container"}
_SECTIONS: dict[str, type[Entry]] = {
    "hosts": HostEntry,
    "containers": ContainerEntry,
    "environments": EnvironmentEntry,
    "jobs": JobEntry,
}


def _known_keys(where: tuple[str | int, ...]) -> list[str]:
    if not where:
        return [name for name in Inventory.model_fields if name != "path"]
    if "gpus" in where:
        return list(GpuEntry.model_fields)
    return list(_SECTIONS[str(where[0])].model_fields)


def _check_references(inventory: Inventory, path: Path, lines: Lines) -> None:
    """Every name that stands for another entry must exist."""

    def check(what: str, name: str | None, known: dict[str, Any], *where: str | int) -> None:
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {listed(known)}"
            raise ConfigurationError(f"{path}:{lines.get(where, 1)}: there is no {what} `{name}`", hint)

    check("container", inventory.default_container, inventory.containers, "default_container")
    check("job", inventory.default_job, inventory.jobs, "default_job")
    for key, container in inventory.containers.items():
        if container.host != "local":
            check("host", container.host, inventory.hosts, "containers", key, "host")
    for key, job in inventory.jobs.items():
        check("environment", job.environment, inventory.environments, "jobs", key, "environment")
        for index, container_name in enumerate(job.containers or ()):
            check("container", container_name, inventory.containers, "jobs", key, "containers", index)
