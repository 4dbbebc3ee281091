"""Reads rows from the source and prepares them, ahead of the targets."""

from __future__ import annotations

import torch

from trainer.data.rows import RowSource
from trainer.pipeline.shared import Shared
from trainer.pipeline.worker import Worker
from trainer.step.step import PreparedRow


class RowWorker(Worker):
    """Reads rows ahead of the targets."""

    def __init__(self, shared: Shared, source: RowSource, block_size: int, *, pin: bool) -> None:
        super().__init__("rows", shared, torch.device("cpu"))
        self._source, self._block_size, self._pin = source, block_size, pin

    def work(self) -> None:
        count = 0
        for number in self.shared.plan.rows():
            self.shared.rows.reserve(count)
            with self.meter.busy(rows=1):
                prepared = self._read(number)
            self.shared.rows.put(count, prepared)
            count += 1
        self.shared.rows.finish(count)

    def _read(self, number: int) -> PreparedRow:
        return PreparedRow.of(self._source.row(number), self._block_size, pin=self._pin)
