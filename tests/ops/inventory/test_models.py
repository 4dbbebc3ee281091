"""docs/inventory.md tells of every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import ContainerEntry, EnvironmentEntry, HostEntry, JobEntry
from tests.ops.inventory.written import GOOD, load

TEXT = (Path(__file__).parents[3] / "docs" / "inventory.md").read_text()


@pytest.mark.parametrize(
    ("section", "entry"),
    [("hosts", HostEntry), ("containers", ContainerEntry), ("environments", EnvironmentEntry), ("jobs", JobEntry)],
)
def test_every_key_of_the_inventory_stands_in_its_table_and_no_other(section: str, entry: type) -> None:
    table = TEXT.split(f"## {section}\n")[1].split("\n## ")[0]
    told = {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert told == set(entry.model_fields)  # type: ignore[attr-defined]


def test_relative_paths_start_at_the_inventory_s_folder(tmp_path: Path) -> None:
    load(tmp_path, GOOD)
    inventory = load_inventory(tmp_path / "inventory.yaml")
    assert inventory.resolve(Path("a/b")) == tmp_path / "a/b"
    assert inventory.resolve(Path("/a/b")) == Path("/a/b")


@pytest.mark.parametrize(
    ("address", "user"), [("127.0.0.7", "root"), ("fe80::1%eth0", "a.b-c"), ("bücher.example", "x@y")]
)
def test_addresses_and_users_as_they_are_in_the_world_are_taken(tmp_path: Path, address: str, user: str) -> None:
    load(tmp_path, GOOD.replace("pve1.example", f"'{address}'\n    user: {user}"))


def test_a_home_that_is_not_there_is_a_mistake_of_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(GOOD)
    with pytest.raises(ConfigurationError, match="the home folder of ~nosuchuser/key"):
        load_inventory(tmp_path / "inventory.yaml").resolve(Path("~nosuchuser/key"))
