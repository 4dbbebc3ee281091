"""The trainer's configuration: the last word on a key wins, and what cannot be is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import Inventory
from dflash_ops.plan.config import dump_yaml, job_config, parse_value
from tests.ops.jobs import planned
from trainer.core_schema import CoreLoader


def test_the_last_word_on_a_key_wins(inventory: Inventory) -> None:
    assert planned(inventory).config["optimizer"] == {"lr": 0.001, "name": "muon"}
    asked = planned(inventory, "optimizer.name=adamw", "optimizer.lr=1e-4", "data.new.key=[1, 'x y']")
    assert asked.config["optimizer"] == {"lr": 1e-4, "name": "adamw"}
    assert asked.config["data"] == {"new": {"key": [1, "x y"]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("-2.5", -2.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("a b", "a b"),
        ("'1'", "1"),
        ('"x\\ny"', "x\ny"),
        ("[cuda:0, cuda:1]", ["cuda:0", "cuda:1"]),
        ("/srv/a b/日.jsonl", "/srv/a b/日.jsonl"),
        ("a=b", "a=b"),
        ("0100", 100),
        ("3:20", "3:20"),
        ("no", "no"),
        ("1_000", "1_000"),
        ("2026-11-30", "2026-11-30"),
    ],
)
def test_values_are_read_as_yaml(text: str, value: object) -> None:
    assert parse_value(text, "key") == value


@pytest.mark.parametrize(
    "change",
    [
        "novalue",
        "=1",
        "a..b=1",
        ".a=1",
        "optimizer.lr.x=1",
        "a=[",
        "a='",
        "a=!!python/x y",
        "a=!!timestamp 2026-11-30",
        "a=.inf",
        "a=[1e999]",
        "a=" + "9" * 5000,
        "a={1: x}",
        "a=&a [*a]",
        "a\udcff=1",
    ],
)
def test_a_change_that_cannot_be_made_is_a_usage_error(inventory: Inventory, change: str) -> None:
    with pytest.raises(UsageError):
        planned(inventory, change)


@pytest.mark.parametrize("config", ["{a: {b: [!!timestamp 2026-11-30]}}", "{a: !!set {x}}", "{1: 1}"])
def test_what_yaml_has_and_a_configuration_has_not_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "inventory.yaml").write_text(f"containers: {{}}\njobs: {{j: {{config: {config}}}}}\n")
    inventory = load_inventory(tmp_path / "inventory.yaml")
    with pytest.raises(ConfigurationError, match="the configuration of job j cannot hold"):
        job_config(inventory, *inventory.job("j"), ())


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(blacklist_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
def test_a_configuration_arrives_as_the_values_it_was(value: object) -> None:
    written = dump_yaml({"key": value})
    assert yaml.load(written, CoreLoader) == yaml.safe_load(written) == {"key": value}


@pytest.mark.parametrize("number", [".inf", "-.INF", ".nan", "1e999"])
def test_a_number_that_is_not_finite_is_named_with_key_file_and_line(inventory: Inventory, number: str) -> None:
    (inventory.path.parent / "base.yaml").write_text(f"optimizer:\n  lr: {number}\n")
    with pytest.raises(ConfigurationError) as caught:
        planned(inventory, job="eight")
    assert caught.value.message.endswith(f"base.yaml:2: `optimizer.lr`: {number} is not a finite number")


def test_a_configuration_file_and_set_read_the_same_value(inventory: Inventory) -> None:
    (inventory.path.parent / "base.yaml").write_text("a: 0100\nb: 12:30:00\nc: 1e-4\nd: off\n")
    read = planned(inventory, "e=0100", "f=12:30:00", "g=1e-4", "h=off", job="eight").config
    assert [read[key] for key in "abcd"] == [read[key] for key in "efgh"] == [100, "12:30:00", 1e-4, "off"]


def test_a_configuration_file_that_is_broken_is_named_with_its_line(inventory: Inventory) -> None:
    (inventory.path.parent / "base.yaml").write_text("a: 1\nb: [\n")
    with pytest.raises(ConfigurationError, match=r"base\.yaml:3"):
        planned(inventory, job="eight")
