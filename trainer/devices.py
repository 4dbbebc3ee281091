"""Finds the device that a name means, and says when this machine does not have it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from trainer.wording import count


class DeviceError(Exception):
    """A device that this machine does not have, or a name that means none."""


def find_device(name: str) -> torch.device:
    """The device of a name; a GPU always has its index, since compiled code depends on it.

    `cuda` alone is the GPU of torchrun's $LOCAL_RANK, so that the processes of one host share a configuration.

    Raises:
        DeviceError: there is no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"'{name}' is no device: write cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device '{name}' is neither a CPU nor a CUDA GPU: write cpu or cuda:0")
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        device = torch.device("cuda", index)
        there = torch.cuda.device_count()
        if index >= there:
            has = count(there, "CUDA GPU") if there else "no CUDA GPU that torch can use"
            raise DeviceError(f"there is no {device}: this machine has {has}")
    return device


def require_devices(name: str, devices: Iterable[str]) -> None:
    """Raise DeviceError, with the name of the field, unless its devices are there."""
    for device in devices:
        try:
            find_device(device)
        except DeviceError as error:
            raise DeviceError(f"{name}: {error}") from error
