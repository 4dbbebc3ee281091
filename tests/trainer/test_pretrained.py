"""Loading a target: every weight of it comes from its files, or it is refused by the weight's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.trainer.tiny_models import FAMILIES, tiny_target
from trainer.config.sections import TargetConfig
from trainer.pretrained import TargetError, describe_fault, load_model

Weights = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, family: str = "qwen3", change: Callable[[Weights], Any] | None = None) -> TargetConfig:
    """A tiny target on the disk, with its weights changed."""
    tiny_target(family).save_pretrained(folder)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return TargetConfig(path=str(folder), dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_target_of_any_family_is_loaded_as_it_was_saved(family: str, tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, family), "cpu")
    for name, tensor in tiny_target(family).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("name", ["lm_head.weight", UP, "model.embed_tokens.weight"])
def test_a_target_whose_files_lack_a_weight_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    config = saved(tmp_path, change=lambda weights: weights.pop(name))
    with pytest.raises(TargetError, match=f"target.path: the files of {tmp_path} lack {name}: fetch them again"):
        load_model(config, "cpu")


def test_a_tied_head_need_not_be_in_the_files_but_the_embedding_must(tmp_path: Path) -> None:
    config = saved(tmp_path / "whole", "llama")
    assert "lm_head.weight" not in load_file(tmp_path / "whole" / "model.safetensors")
    load_model(config, "cpu")
    config = saved(tmp_path / "part", "llama", lambda weights: weights.pop("model.embed_tokens.weight"))
    with pytest.raises(TargetError, match=r"lack lm_head.weight and 1 more"):
        load_model(config, "cpu")


def test_a_weight_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    config = saved(tmp_path, change=lambda weights: weights.update({UP: torch.ones(3, 2)}))
    with pytest.raises(TargetError, match=rf"hold {UP} in the shape \[3, 2\], but config.json makes it \[48, 32\]"):
        load_model(config, "cpu")


def test_weights_that_the_model_has_no_place_for_are_refused_in_the_order_of_layers(tmp_path: Path) -> None:
    config = saved(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    layers = {"num_hidden_layers": 5, "layer_types": settings["layer_types"][:5]}
    (tmp_path / "config.json").write_text(json.dumps(settings | layers))
    with pytest.raises(TargetError, match=r"hold model.layers.5.input_layernorm.weight and \d+ more, for which"):
        load_model(config, "cpu")


def test_parts_that_a_language_model_does_without_are_left_in_the_files(tmp_path: Path) -> None:
    others = [
        "model.visual.blocks.0.norm1.weight",
        "vision_tower.x",
        "mtp.fc.weight",
        "model.layers.2.self_attn.k_scale",
    ]
    others += ["model.layers.6.eh_proj.weight", "model.layers.6.mlp.up_proj.weight"]  # predicts a further token
    load_model(saved(tmp_path, change=lambda weights: weights.update({name: torch.ones(2) for name in others})), "cpu")


def test_a_layer_behind_those_that_predict_further_tokens_is_still_refused() -> None:
    unexpected = {"model.layers.6.eh_proj.weight", "model.layers.6.a", "model.layers.60.a"}
    fault = describe_fault({"missing_keys": (), "mismatched_keys": (), "unexpected_keys": unexpected, "error_msgs": ()})
    assert fault is not None
    assert fault.startswith("hold model.layers.60.a, for which")


def test_files_that_end_early_are_one_sentence(tmp_path: Path) -> None:
    config = saved(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TargetError, match=f"the target {tmp_path} cannot be loaded: ") as caught:
        load_model(config, "cpu")
    assert "\n" not in str(caught.value)
