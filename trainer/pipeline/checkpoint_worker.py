"""Writes checkpoints while training goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.pipeline.shared import Shared
from trainer.pipeline.types import TrainState
from trainer.pipeline.worker import Worker


class CheckpointWorker(Worker):
    """Writes checkpoints, one at a time, beside the training."""

    def __init__(self, shared: Shared, save: Callable[[TrainState, Tensor | None], None]) -> None:
        super().__init__("checkpoint", shared, torch.device("cpu"))
        self._save = save

    def work(self) -> None:
        while (taken := self.shared.checkpoints.take()) is not None:
            count, item = taken
            self._write(item)
            self.shared.checkpoints.release(count)

    def _write(self, item: tuple[TrainState, Tensor | None]) -> None:
        self.saving.set()
        self._save(*item)
        self.saving.clear()
        if self.shared.unsaved is item:
            self.shared.unsaved = None
