"""Drafters in the released layout, read and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Qwen3Config,
)

from tests.trainer.drafter.test_config import SIZES
from trainer.config.sections import DrafterSection
from trainer.drafter.config import DrafterConfig, DrafterConfigError
from trainer.drafter.for_target import config_for_target
from trainer.drafter.model import DFlashDrafter
from trainer.drafter.released import fingerprint, read_drafter, write_drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny drafter on disk, made for a target of `SIZES`."""
    config = config_for_target(DrafterSection(num_layers=2, mask_token_id=99), Qwen3Config(**SIZES))
    write_drafter(tmp_path, config, DFlashDrafter(config, seed=3).state_dict(), torch.float32)
    return tmp_path


def test_a_drafter_read_back_has_the_weights_that_were_written(folder: Path) -> None:
    drafter = read_drafter(folder)
    again = DFlashDrafter(drafter.config, seed=3).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.state_dict().items())


def test_damaged_folders_are_refused_with_the_reason(folder: Path) -> None:
    drafter = read_drafter(folder)
    weights = drafter.state_dict()
    save_file({name: tensor for name, tensor in weights.items() if name != "fc.weight"}, folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=r"lacks fc\.weight"):
        read_drafter(folder)
    save_file(weights | {"lm_head.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=r"has lm_head\.weight"):
        read_drafter(folder)
    save_file(weights | {"norm.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=r"norm\.weight is \[1\]"):
        read_drafter(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DrafterConfigError, match="cannot be read"):
        read_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DrafterConfigError, match=r"config\.json"):
        read_drafter(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DrafterConfigError, match="not a drafter"):
        read_drafter(folder)


def test_sharded_weights_are_read(folder: Path) -> None:
    weights, whole = read_drafter(folder).state_dict(), fingerprint(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_drafter(folder).state_dict().items())
    assert fingerprint(folder) == whole


def test_training_continues_from_a_drafter_in_its_own_shape_only(folder: Path) -> None:
    target = Qwen3Config(**SIZES)
    same = DrafterSection(init_from=folder, block_size=16)
    assert config_for_target(same, target) == DrafterConfig.read(folder)
    repeated = same.model_copy(update={"num_layers": 2, "target_layer_ids": [1, 9], "full_attention_layers": [0, 1]})
    assert config_for_target(repeated, target) == DrafterConfig.read(folder)
    for change in ({"block_size": 8}, {"full_attention_layers": [1]}, {"target_layer_ids": [2, 9]}, {"num_layers": 3}):
        (name,) = change
        with pytest.raises(DrafterConfigError, match=rf"drafter\.{name} is .*; leave {name} out"):
            config_for_target(DrafterSection(init_from=folder, **change), target)  # type: ignore[arg-type]
    with pytest.raises(DrafterConfigError, match="made for another target"):
        config_for_target(same, Qwen3Config(**SIZES | {"num_hidden_layers": 13}))


def test_training_does_not_continue_from_a_drafter_whose_layers_would_have_to_be_guessed(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    section = DrafterSection(init_from=folder)
    del document["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(document))
    assert config_for_target(section, Qwen3Config(**SIZES)).target_layer_ids == (1, 9), "the nested ones are there"
    del document["dflash_config"]["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(DrafterConfigError, match=r"config.json does not say which layers .*: add target_layer_ids"):
        config_for_target(section, Qwen3Config(**SIZES))
