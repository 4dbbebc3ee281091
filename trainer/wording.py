"""Writes numbers for people, and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def count(number: int, noun: str) -> str:
    """`1 row`, `12 rows`: a number with its noun, whose plural is regular."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def finite(value: Any) -> Any:
    """The same document with null for numbers that JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
