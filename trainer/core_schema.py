"""Reads YAML scalars by the core schema of YAML 1.2: what was typed is what is read.

PyYAML follows YAML 1.1, where `0310` is 200, `3:20` is 200, `no` is false and `1e-4` is text. ruamel.yaml comes
closer and still reads `1_000` as a number and `2026-11-30` as a date; it would also have to be installed wherever a
trainer runs, and PyYAML is there already (transformers needs it). So this is PyYAML's reader with the resolver of
the core schema (https://yaml.org/spec/1.2.2/#103-core-schema) and `<<`, which YAML 1.2 lacks and people write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import yaml

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (re.compile(r"(?:null|Null|NULL|~|)\Z"), ("n", "N", "~", "")),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), tuple("tTfF")),
    "int": (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), tuple("-+0123456789")),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        tuple("-+.0123456789"),
    ),
}


class CoreLoader(yaml.SafeLoader):
    """PyYAML's safe reader with the scalars of the core schema."""


class CoreDumper(yaml.SafeDumper):
    """PyYAML's safe writer; text that YAML 1.1 or YAML 1.2 would read as something else is put in quotes."""


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """A scalar's value. Raises yaml.constructor.ConstructorError where a tag asks for what the text is not."""
    kind = node.tag.removeprefix(_PREFIX)
    text = node.value
    if not _SCALARS[kind][0].match(text):
        raise yaml.constructor.ConstructorError(None, None, f"`{text}` is no {kind}", node.start_mark)
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        case _:
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


CoreLoader.yaml_implicit_resolvers = {}  # without those of YAML 1.1
for _kind, (_pattern, _first) in _SCALARS.items():
    CoreLoader.add_implicit_resolver(_PREFIX + _kind, _pattern, list(_first))
    CoreDumper.add_implicit_resolver(_PREFIX + _kind, _pattern, list(_first))
    CoreLoader.add_constructor(_PREFIX + _kind, _scalar)
CoreLoader.add_implicit_resolver(_PREFIX + "merge", re.compile(r"<<\Z"), ["<"])


def read_value(text: str) -> Any:
    """A single value such as that of --set. Raises yaml.YAMLError, ValueError, RecursionError."""
    value = yaml.load(text, CoreLoader)
    for number in _scalars_of(value):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"`{text}` is not a finite number")
    return value


def not_finite(node: yaml.Node) -> bool:
    """Whether a node is a number that is infinite, too large for one, or NaN."""
    if not isinstance(node, yaml.ScalarNode) or node.tag != _PREFIX + "float":
        return False
    try:
        return not math.isfinite(float(node.value))
    except ValueError:  # `.inf` and `.nan`, or a tag that the constructor refuses
        return str(node.value).lower().endswith((".inf", ".nan"))


def as_text(node: yaml.Node) -> yaml.Node:
    """The node of a plain scalar as the text that stands there; any other node, and an empty one, as it is."""
    if isinstance(node, yaml.ScalarNode) and node.value and node.tag.removeprefix(_PREFIX) in _SCALARS:
        return yaml.ScalarNode(_PREFIX + "str", node.value, node.start_mark, node.end_mark)
    return node


def no_boolean_as_number(value: object, annotation: object) -> object:
    """`value`, checked: true and false are not 1 and 0 where `annotation` takes numbers. Raises ValueError."""
    kinds = set(_leaves(annotation))
    if kinds & {int, float} and bool not in kinds and any(isinstance(item, bool) for item in _scalars_of(value)):
        raise ValueError("a number must stand here, not true or false")
    return value


def _leaves(annotation: object) -> Iterable[object]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for each in inner:
        yield from _leaves(each)


def _scalars_of(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _scalars_of(item)
    else:
        yield value
