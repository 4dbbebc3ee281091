"""docs/inventory.md tells of every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_ops.inventory.models import EnvironmentEntry, HostEntry, JobEntry, TargetEntry

TEXT = (Path(__file__).parents[2] / "docs" / "inventory.md").read_text()


@pytest.mark.parametrize(
    ("section", "entry"),
    [("hosts", HostEntry), ("targets", TargetEntry), ("environments", EnvironmentEntry), ("jobs", JobEntry)],
)
def test_every_key_of_the_inventory_stands_in_its_table_and_no_other(section: str, entry: type) -> None:
    table = TEXT.split(f"## {section}\n")[1].split("\n## ")[0]
    told = {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert told == set(entry.model_fields)  # type: ignore[attr-defined]
