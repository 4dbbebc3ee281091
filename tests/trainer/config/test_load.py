"""Configurations: read, refused with one sentence, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import trainer
from trainer.config.explain import explain
from trainer.config.load import ConfigError, apply_overrides, load
from trainer.config.sections import RunConfig

CONFIGS = sorted((Path(trainer.__file__).parent / "configs").glob("*.yaml"))
SMALL = "target:\n  path: models/small\ndata:\n  sources: [a.jsonl]\n"


def problem(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_a_minimal_file_has_the_recipes_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL)
    loaded = load(path)
    assert loaded.optimizer.lr == 6e-4
    assert loaded.data.sequence_length == 3072


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SMALL + "optimizer:\n  lrr: 1\n",
            "run.yaml line 6: optimizer.lrr is not a known key; did you mean optimizer.lr?",
        ),
        (
            SMALL + "pipeline:\n  drafters: []\n",
            "run.yaml line 6: pipeline.drafters: list should have at least 1 item after validation, not 0",
        ),
        (
            SMALL + "pipeline:\n  targets: []\n",
            "run.yaml line 6: pipeline.targets: list should have at least 1 item after validation, not 0",
        ),
        (
            SMALL + "optimizer:\n  accumulate: 2\n",
            "run.yaml line 6: optimizer.accumulate is now called optimizer.gradient_accumulation_steps",
        ),
        (SMALL + "lr: 1\n", "run.yaml line 5: lr is not a known key; did you mean optimizer.lr?"),
        (SMALL + "optimiser:\n  lr: 1\n", "run.yaml line 5: optimiser is not a known key; did you mean optimizer?"),
        (SMALL + "xyzzy: 1\n", "run.yaml line 5: xyzzy is not a known key"),
        (
            "data:\n  sources: [a.jsonl]\n",
            "run.yaml: target is missing (The frozen model whose hidden states the drafter reads)",
        ),
        (
            "target: {}\ndata:\n  sources: [a.jsonl]\n",
            "run.yaml line 1: target.path is missing "
            "(Folder or hub name of the target, as transformers' from_pretrained takes it)",
        ),
        (
            SMALL + "optimizer:\n  lr: -1\n",
            "run.yaml line 6: optimizer.lr: input should be greater than 0 (it is -1)",
        ),
        (
            SMALL + "objective:\n  weighting: decays\n",
            "run.yaml line 6: objective.weighting: input should be 'decay', 'dpace' or 'uniform' (it is 'decays')",
        ),
        (
            SMALL + "  sequence_length: 100\n  max_document_length: 200\n",
            "run.yaml line 3: data: max_document_length must not exceed sequence_length, "
            "for documents lie whole in a row",
        ),
        (SMALL + "seed: 1\nseed: 2\n", "run.yaml line 6: seed appears twice; delete one of them"),
        (SMALL + "  sources: [b.jsonl]\n", "run.yaml line 5: sources appears twice; delete one of them"),
        (
            SMALL + "drafter:\n  head_dim: 3\n",
            "run.yaml line 6: drafter.head_dim: input should be a multiple of 2 (it is 3)",
        ),
        (
            SMALL + "drafter:\n  target_layer_ids: []\n",
            "run.yaml line 6: drafter.target_layer_ids: list should have at least 1 item after validation, not 0",
        ),
        (
            SMALL + "drafter:\n  sliding_window: 0\n",
            "run.yaml line 6: drafter.sliding_window: input should be greater than or equal to 1 (it is 0)",
        ),
        (
            "target: [1\n",
            "run.yaml line 2 is not YAML: expected ',' or ']', but got '<stream end>'",
        ),
        (
            "",
            "run.yaml must be a mapping with the sections target, drafter, data, objective, optimizer, pipeline, "
            "checkpoint, telemetry, seed",
        ),
    ],
)
def test_a_faulty_file_is_refused_with_place_and_cure(tmp_path: Path, text: str, expected: str) -> None:
    assert problem(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed: \x00", "run.yaml is not YAML: unacceptable character #x0000: special characters are not allowed"),
        (b"seed: \xff", "run.yaml is not YAML: 'utf-8' codec can't decode byte 0xff in position 6: invalid start byte"),
        (b"target: &t\n  path: *t\n", "run.yaml has an alias that holds itself"),
        (b"target:\n  ? [a]\n  : b\n", "run.yaml line 2: a key must be a plain word"),
    ],
)
def test_a_file_that_no_person_wrote_is_refused_in_one_sentence(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).replace(f"{tmp_path}/", "") == expected


def test_every_fault_of_a_file_is_told(tmp_path: Path) -> None:
    told = problem(tmp_path, SMALL + "optimizer:\n  lr: -1\n  bettas: [0.9, 0.95]\n").splitlines()
    assert len(told) == 2
    assert any("did you mean optimizer.betas?" in line for line in told)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml cannot be read: No such file or directory"):
        load(tmp_path / "nowhere.yaml")


def test_overrides_win_over_the_file_and_read_their_values_as_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL + "optimizer:\n  lr: 1.0e-3\n")
    loaded = load(
        path,
        [
            "optimizer.lr=2e-4",
            "pipeline.targets=[cpu]",
            "optimizer.max_steps=null",
            "data.chat_template_kwargs={x: false, y: no}",
        ],
    )
    assert loaded.optimizer.lr == 2e-4
    assert loaded.pipeline.targets == ["cpu"]
    assert loaded.optimizer.max_steps is None
    assert loaded.data.chat_template_kwargs == {"x": False, "y": "no"}


def test_overrides_do_not_change_what_they_are_applied_to() -> None:
    values = {"optimizer": {"lr": 1}}
    assert apply_overrides(values, ["optimizer.lr=2", "new.key=3"]) == {"optimizer": {"lr": 2}, "new": {"key": 3}}
    assert values == {"optimizer": {"lr": 1}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr", "'optimizer.lr' is not an override; write section.field=value, as in optimizer.lr=1e-4"),
        ("=3", "'=3' is not an override; write section.field=value, as in optimizer.lr=1e-4"),
        ("optimizer.lr=[", "the value of override 'optimizer.lr=[' is not YAML"),
        ("optimizer.lrr=1", "override: optimizer.lrr is not a known key; did you mean optimizer.lr?"),
        ("optimizer.lr=0", "override: optimizer.lr: input should be greater than 0 (it is 0)"),
    ],
)
def test_a_faulty_override_is_refused_with_its_cure(tmp_path: Path, override: str, expected: str) -> None:
    assert problem(tmp_path, SMALL, override) == expected


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= leaves(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def test_every_field_has_a_meaning_and_is_explained_with_its_default() -> None:
    lines = [line.strip() for line in explain().splitlines()]
    for name, field in leaves(RunConfig).items():
        assert field.description, name
        last = name.rpartition(".")[2]
        assert any(line.startswith(f"{last}: ") and field.description in line for line in lines), name
    assert any(line.startswith("lr: 0.0006  # ") and line.endswith("[number, > 0]") for line in lines)
    assert any(line.startswith("path: (required)  # ") for line in lines)


def test_the_explanation_is_a_valid_file_once_the_required_fields_are_filled_in(tmp_path: Path) -> None:
    text = explain().replace("path: (required)", "path: x").replace("sources: (required)", "sources: [a.jsonl]")
    path = tmp_path / "run.yaml"
    path.write_text(text)
    (tmp_path / "small.yaml").write_text("target: {path: x}\ndata: {sources: [a.jsonl]}\n")
    assert load(path) == load(tmp_path / "small.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_valid_and_repeats_no_default(path: Path) -> None:
    loaded = load(path)
    fields = leaves(RunConfig)

    def given(values: dict[str, Any], prefix: str = "") -> list[str]:
        return [
            name
            for key, value in values.items()
            for name in (
                given(value, f"{prefix}{key}.")
                if isinstance(value, dict) and f"{prefix}{key}" not in fields
                else [prefix + key]
            )
        ]

    for name in given(yaml.safe_load(path.read_text())):
        section: Any = loaded
        for part in name.split("."):
            section = getattr(section, part)
        assert fields[name].is_required() or section != fields[name].get_default(call_default_factory=True), name


def test_the_examples_are_those_that_the_documentation_names() -> None:
    assert [path.stem for path in CONFIGS] == ["qwen3-8b", "qwen3.6-27b", "smollm2-cpu"]
    eight = load(next(path for path in CONFIGS if path.stem == "qwen3.6-27b")).pipeline
    assert eight.targets == [f"cuda:{number}" for number in range(5)]
    assert eight.drafters == [f"cuda:{number}" for number in range(5, 8)]
