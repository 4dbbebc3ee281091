"""Writes numbers for people."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """`1 row`, `12 rows`: a number with its noun, whose plural is regular."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
