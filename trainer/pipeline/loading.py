"""Puts what was loaded onto the devices, and describes it for comparison between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.exchange.rendezvous import digest
from trainer.pipeline.types import TrainState
from trainer.target.model import Target


class Tables:
    """The target's embedding and head on each drafter device, in the drafters' compute type, once per GPU."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._made:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            embedding = self._target.embedding.to(device, dtype)
            tied = self._target.head is self._target.embedding
            self._made[device] = embedding, embedding if tied else self._target.head.to(device, dtype)
        return self._made[device]


def describe_loaded(target: Target, weights: Mapping[str, Tensor], start: TrainState | None) -> dict[str, Any]:
    """What only loading tells, and has to be alike in all processes."""
    described = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # say nothing of the model
        described.pop(name, None)
    return {
        "a target of the configuration": digest(json.loads(json.dumps(described, sort_keys=True, default=str))),
        "starting weights": digest(dict(weights)),
        "starting moments": digest(start.optimizer) if start is not None else None,
    }


def finish_loading(devices: set[torch.device]) -> None:
    """Wait for what this thread has put on the devices: the workers' streams do not wait for its stream."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
