"""The facts of a healthy container, changed where a test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_ops.run.facts import Facts, read_facts

FIXTURES = Path(__file__).parent / "fixtures"
GREW = {"bytes": 1 << 40, "files": 1, "newest": 1.0}


def given(**changes: Any) -> Facts:
    """Facts of a healthy container with one H200, changed where a test says. Dots in names reach into parts."""
    value = json.loads((FIXTURES / "facts.json").read_text())
    for name, change in changes.items():
        *parts, last = name.split("__")
        place = value
        for part in parts:
            place = place[part]
        place[last] = change
    return read_facts(value, "the test")
