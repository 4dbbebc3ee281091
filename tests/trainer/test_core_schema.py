"""What was typed is what is read: the core schema of YAML 1.2, in files and in single values alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.load import ConfigError, load
from trainer.core_schema import CoreDumper, CoreLoader, read_value

SMALL = "target:\n  path: models/small\ndata:\n  sources: [a.jsonl]\n"
TYPED = [
    ("0310", 310),
    ("0200", 200),
    ("010", 10),
    ("-07", -7),
    ("+12", 12),
    ("0o17", 15),
    ("0x1F", 31),
    ("0b11", "0b11"),
    ("1_000", "1_000"),
    ("3:20", "3:20"),
    ("12:30:00", "12:30:00"),
    ("2026-11-30", "2026-11-30"),
    ("3.10", 3.1),
    ("1e-4", 1e-4),
    ("1e5", 1e5),
    (".5", 0.5),
    ("1.", 1.0),
    (".", "."),
    ("=", "="),
    ("no", "no"),
    ("yes", "yes"),
    ("on", "on"),
    ("Off", "Off"),
    ("y", "y"),
    ("True", True),
    ("FALSE", False),
    ("tRUE", "tRUE"),
    ("null", None),
    ("~", None),
    ("", None),
    ("Null", None),
]


@pytest.mark.parametrize(("text", "value"), TYPED)
def test_a_scalar_is_what_the_core_schema_says(text: str, value: Any) -> None:
    for read in (read_value(text), yaml.load(f"key: {text}\n", CoreLoader)["key"]):
        assert read == value
        assert type(read) is type(value)


@pytest.mark.parametrize("text", [".inf", "-.Inf", ".NaN", "1e999", "[1, .inf]", "{a: .nan}", "9" * 5000])
def test_a_number_that_is_not_finite_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_value(text)


@pytest.mark.parametrize("text", ["!!int 3:20", "!!bool yes", "!!float x"])
def test_a_tag_does_not_bring_yaml_1_1_back(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_value(text)


@given(st.one_of(st.text(st.characters(blacklist_categories=["Cs"])), st.sampled_from([text for text, _ in TYPED])))
def test_text_that_is_written_stays_text_for_both_versions_of_yaml(text: str) -> None:
    written = yaml.dump([text], Dumper=CoreDumper)
    assert yaml.load(written, CoreLoader) == yaml.safe_load(written) == [text]


@given(st.one_of(st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_values_that_are_written_are_the_same_for_both_versions_of_yaml(value: object) -> None:
    written = yaml.dump([value], Dumper=CoreDumper)
    for read in (yaml.load(written, CoreLoader)[0], yaml.safe_load(written)[0]):
        assert read == value
        assert type(read) is type(value)


def test_a_merged_mapping_is_still_merged() -> None:
    assert yaml.load("a: &a {x: 010}\nb: {<<: *a, y: no}\n", CoreLoader)["b"] == {"x": 10, "y": "no"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("optimizer:\n  lr: yes\n", "line 6: optimizer.lr: input should be a valid number"),
        ("optimizer:\n  lr: true\n", "line 6: optimizer.lr: a number must stand here, not true or false"),
        ("optimizer:\n  lr: .inf\n", "line 6: optimizer.lr: .inf is not a finite number"),
        ("optimizer:\n  lr: 1e400\n", "line 6: optimizer.lr: 1e400 is not a finite number"),
        ("optimizer:\n  betas: [0.9, true]\n", "line 6: optimizer.betas: a number must stand here"),
        ("optimizer:\n  betas:\n    - 0.9\n    - .nan\n", "line 8: optimizer.betas.1: .nan is not a finite number"),
        ("checkpoint:\n  every: true\n", "line 6: checkpoint.every: a number must stand here"),
        ("checkpoint:\n  every: 3:20\n", "line 6: checkpoint.every: input should be a valid integer"),
        ("drafter:\n  target_layer_ids: [true]\n", "line 6: drafter.target_layer_ids: a number must stand here"),
    ],
)
def test_a_number_that_is_none_is_refused_with_key_file_and_line(tmp_path: Path, lines: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL + lines)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} {expected}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=.inf", "override optimizer.lr: `.inf` is not a finite number"),
        ("optimizer.max_steps=true", "override: optimizer.max_steps: a number must stand here"),
        ("optimizer.lr=yes", "override: optimizer.lr: input should be a valid number"),
    ],
)
def test_an_override_that_is_no_number_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml", [override])
    assert str(caught.value).startswith(expected)


def test_numbers_with_leading_zeros_are_decimal_in_the_file_and_in_overrides(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL + "checkpoint: {every: 0100}\n")
    loaded = load(tmp_path / "run.yaml", ["optimizer.max_steps=0100", "optimizer.lr=1e-4"])
    assert (loaded.checkpoint.every, loaded.optimizer.max_steps, loaded.optimizer.lr) == (100, 100, 1e-4)
