"""Prints every field of a run's configuration with its meaning, kind and default."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.sections import RunConfig


def explain() -> str:
    """Every field with its meaning, kind and default, in the shape of the YAML file, for `trainer config --explain`."""
    return "\n".join(_explain(RunConfig, 0))


def _explain(section: type[BaseModel], depth: int) -> Iterator[str]:
    margin = "  " * depth
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield f"{margin}{name}:  # {(inner.__doc__ or '').strip()}"
            yield from _explain(inner, depth + 1)
            yield ""
        else:
            kind = f"{_kind(field.annotation)}{_bounds(field)}"
            yield f"{margin}{name}: {_default(field)}  # {field.description} [{kind}]"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _kind(annotation: Any) -> str:
    """An annotation in words a YAML writer uses."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(_kind(argument) for argument in arguments)
    if origin in (list, tuple):
        return "list of " + _kind(arguments[0])
    if origin is dict:
        return "mapping"
    names = {type(None): "null", Path: "path", str: "text", bool: "true | false", int: "integer", float: "number"}
    return names.get(annotation, str(annotation))


def _bounds(field: FieldInfo) -> str:
    """Limits of a number, as ", >= 1"."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return "".join(f", {limit}" for limit in limits)
