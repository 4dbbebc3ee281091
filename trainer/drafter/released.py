"""Reads and writes a drafter as a folder in the released layout (config.json, model.safetensors).

Training checkpoints hold the same two files, so they are read here too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.drafter.config import DrafterConfig, DrafterConfigError
from trainer.drafter.model import DFlashDrafter


def read_drafter(folder: Path, *, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    """Return the drafter in `folder` on the CPU, its weights in `dtype` (float32: masters for training).

    Raises DrafterConfigError for a folder that holds no drafter, another kind of drafter, or not all of one.
    """
    config = DrafterConfig.read(folder)
    drafter = DFlashDrafter(config, seed=None)
    weights = _weights(folder)
    expected = drafter.state_dict()
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which DFlash does not know"
        raise DrafterConfigError(f"{folder} is not a DFlash drafter: its weights file {what}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise DrafterConfigError(
                f"{folder}: {name} is {list(tensor.shape)}, but config.json makes it {list(expected[name].shape)}"
            )
    drafter.load_state_dict(weights)
    return drafter.to(dtype)


def write_drafter(folder: Path, config: DrafterConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write config.json and one model.safetensors in `dtype` into an existing folder."""
    document = config.to_json(str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes its file readable by its owner alone; a server may be somebody else.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the drafter's weights, by which measurements and drafters are matched."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_weights(folder).items()):
        digest.update(name.encode())
        digest.update(tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _weights(folder: Path) -> dict[str, Tensor]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if whole.exists():
            return load_file(whole)
        if index.exists():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise DrafterConfigError(f"the weights in {folder} cannot be read: {error}") from error
    raise DrafterConfigError(f"{folder} has no model.safetensors")
