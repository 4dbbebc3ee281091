"""Reads a run's YAML file and says what is wrong with it by file, line and cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainer.config.sections import RENAMED_KEYS, RunConfig
from trainer.core_schema import CoreLoader, not_finite, read_value


class ConfigError(Exception):
    """A configuration that cannot be used; one sentence a problem, each naming file, line and cure."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file; `overrides` are "section.field=value" texts that win over the file.

    Raises:
        ConfigError: unreadable file, unknown key, missing or impossible value; says where and what to write instead.
    """
    try:
        loader = CoreLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is not None:
            _refuse_unclear(path, root)
        values = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where} is not YAML: {error.problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} has an alias that holds itself") from error
    except (yaml.YAMLError, ValueError) as error:  # bytes or characters that no text has, numbers of 5000 digits
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if root is None or not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping with the sections {', '.join(RunConfig.model_fields)}")
    try:
        return RunConfig.model_validate(apply_overrides(values, overrides))
    except ValidationError as error:
        set_paths = {override.partition("=")[0].strip() for override in overrides}
        problems = [_sentence(path, root, set_paths, problem) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from error


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `values` with "section.field=value" texts applied; values are read as YAML.

    Raises:
        ConfigError: a text is not of that form.
    """
    result = dict(values)
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"{override!r} is not an override; write section.field=value, as in optimizer.lr=1e-4")
        try:
            value = read_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of override {override!r} is not YAML") from error
        except ValueError as error:
            raise ConfigError(f"override {name.strip()}: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"the value of override {override!r} holds itself") from error
        section = result
        for key in keys[:-1]:
            inner = section.get(key)
            section[key] = dict(inner) if isinstance(inner, dict) else {}
            section = section[key]
        section[keys[-1]] = value
    return result


def _refuse_unclear(path: Path, node: yaml.Node, where: tuple[str, ...] = ()) -> None:
    """Refuse equal keys, of which YAML would quietly take the last, and numbers that are not finite."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path} line {key.start_mark.line + 1}: a key must be a plain word")
            if key.value in seen:
                raise ConfigError(
                    f"{path} line {key.start_mark.line + 1}: {key.value} appears twice; delete one of them"
                )
            seen.add(key.value)
            _refuse_unclear(path, value, (*where, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_unclear(path, item, (*where, str(index)))
    elif not_finite(node):
        line = node.start_mark.line + 1
        raise ConfigError(f"{path} line {line}: {'.'.join(where)}: {node.value} is not a finite number")


def _sentence(path: Path, root: yaml.Node, set_paths: set[str], problem: ErrorDetails) -> str:
    """What is wrong, where, and what to write instead."""
    # Behind a field that may be of several types pydantic appends the type it tried: only real keys are shown.
    location = [part for part in problem["loc"] if isinstance(part, int) or "[" not in part]
    name = ".".join(str(part) for part in location)
    line = _line(root, location)
    overridden = any(f"{name}.".startswith(f"{set_path}.") for set_path in set_paths)
    where = "override" if overridden else f"{path} line {line}" if line else str(path)
    if problem["type"] == "extra_forbidden":
        if name in RENAMED_KEYS:
            return f"{where}: {name} is now called {RENAMED_KEYS[name]}"
        nearest = _nearest(name)
        return f"{where}: {name} is not a known key" + (f"; did you mean {nearest}?" if nearest else "")
    if problem["type"] == "missing":
        return f"{where}: {name} is missing ({_description(name)})"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    value = problem["input"]
    shown = f" (it is {value!r})" if isinstance(value, str | int | float) or value is None else ""
    return f"{where}: {name}: {message}{shown}"


def _line(root: yaml.Node, location: Sequence[int | str]) -> int | None:
    """Line of the deepest key of `location` that the file holds."""
    node, line = root, None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted names of all fields, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")


def _description(name: str) -> str:
    field = dict(_fields()).get(name)
    if field is None:
        return "required"
    inner = field.annotation
    text = field.description or (inner.__doc__ if isinstance(inner, type) else None) or "required"
    return text.strip().rstrip(".")


def _nearest(name: str) -> str | None:
    """The known key that was probably meant: a sibling, or the same name in another section."""
    known = [path for path, _ in _fields()]
    parent, _, last = name.rpartition(".")
    siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(last, siblings, 1)
    if close:
        return siblings[close[0]]
    elsewhere: dict[str, str] = {}
    for path in known:
        elsewhere.setdefault(path.rpartition(".")[2], path)
    close = difflib.get_close_matches(last, elsewhere, 1)
    return elsewhere[close[0]] if close else None
