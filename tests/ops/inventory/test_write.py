"""Entries are added to inventory.yaml without touching a byte of what stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import DflashError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.write import Addition, extended, new_text, write

NEW = [
    Addition("hosts", "new", {"address": "10.0.0.9", "user": "root"}, {"address": "a name that ssh knows"}),
    Addition("containers", "200", {"host": "new", "container": 200}, {"": "8 × NVIDIA H200"}),
    Addition("environments", "new", {"python": "/opt/new/bin/python"}, {}),
]
BLOCK = """\
# mine
default_container: old   # this one

hosts:
    old: {address: a}   # four spaces

    # the last word on hosts

# about containers
containers:
    old:
        host: old
        container: 100

# what runs
jobs:
    j:
        config: {a: 1}
        env:
            TEXT: |
                # no comment

                second
"""
TEXTS = [
    BLOCK,
    (Path(__file__).parents[3] / "inventory.yaml").read_text(),
    BLOCK.replace("\n", "\r\n"),
    "containers: {here: {host: local}}\n",
    "containers: {}",
    "hosts: {}\ncontainers:\n- x\n".replace("\n- x", " {a: {host: local},  # why\n  b: {host: local},\n}"),
    "hosts:\n  old:\n    address: a\ncontainers:\n  old: {host: old, container: 100}\n# the end",
    "containers:\n  here:\n    host: local\n\n\n# trailing\n\n",
    "containers:\n  here: {host: local}\nenvironments:\n  e:\n    python: /p\n    # about lock\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_stands_there_stays_and_the_new_entries_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(text, newline="")
    before = load_inventory(path)
    write(path, extended(text, NEW, []), NEW)
    after = load_inventory(path)
    assert after.hosts["new"].user == "root"
    assert after.containers["200"].container == 200
    assert after.environments["new"].python == "/opt/new/bin/python"
    assert all(after.containers[name] == entry for name, entry in before.containers.items())
    assert after.jobs == before.jobs
    rest = iter(path.read_bytes().decode())
    assert all(letter in rest for letter in text)  # the old text is what remains without the new one
    assert [entry.name for entry in tmp_path.iterdir()] == ["inventory.yaml"]


def test_an_entry_comes_after_the_last_one_of_its_section_and_before_the_next_ones_comment(tmp_path: Path) -> None:
    text = extended(BLOCK, NEW, [])
    assert "    # the last word on hosts\n    new:\n      address: 10.0.0.9" in text
    assert "        container: 100\n    '200':" in text
    assert text.endswith("second\n\nenvironments:\n  new:\n    python: /opt/new/bin/python\n")


def test_a_whole_new_inventory_is_read_and_keeps_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    write(path, new_text(NEW, "200", "# head\n", "# tail\n"), NEW)
    assert load_inventory(path).container(None)[1].container == 200
    text = path.read_text()
    assert text.startswith("# head\n")
    assert text.endswith("# tail\n")
    assert "# 8 × NVIDIA H200" in text


def test_an_entry_that_is_only_a_comment_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(BLOCK)
    hidden = [Addition("environments", "e", {"python": "/p"}, {}, commented_out=True)]
    with pytest.raises(DflashError):  # a section of comments alone is no mapping
        write(path, extended(BLOCK, hidden, []), hidden)
    with_one = BLOCK + "environments:\n    a: {python: /a}\n"
    path.write_text(with_one)
    write(path, extended(with_one, hidden, []), hidden)
    assert list(load_inventory(path).environments) == ["a"]
    assert path.read_text() == with_one + "    # e:\n    #   python: /p\n"


def test_the_files_mode_stays_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(BLOCK)
    (tmp_path / "real.yaml").chmod(0o600)
    path = tmp_path / "inventory.yaml"
    path.symlink_to("real.yaml")
    write(path, extended(BLOCK, NEW, []), NEW)
    assert path.is_symlink()
    assert "new" in load_inventory(path).hosts
    assert (tmp_path / "real.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "{containers: {here: {host: local}}}",
        "containers: {new: {host: local}}\nhosts: {}",
        BLOCK.removesuffix("\n"),  # a line end more would be a part of the variable's value
    ],
)
def test_where_nothing_can_be_added_the_file_stays_and_the_entries_are_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(text)
    clash = [*NEW, Addition("containers", "new", {"host": "new", "container": 200}, {})]
    with pytest.raises(DflashError) as caught:
        write(path, extended(text, clash, []), clash)
    assert caught.value.code == 78
    assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["inventory.yaml"]
