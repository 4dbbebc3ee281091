"""Reads rows from the source and prepares them, ahead of the targets."""

from __future__ import annotations

import torch

from trainer.data.rows import RowSource
from trainer.pipeline.plan import PlannedRow
from trainer.pipeline.shared import Shared
from trainer.pipeline.worker import Worker
from trainer.step.step import PreparedRow


class RowWorker(Worker):
    """Reads rows ahead of the targets."""

    def __init__(
        self, shared: Shared, source: RowSource, block_size: int, *, pin: bool, held_out: RowSource | None = None
    ) -> None:
        super().__init__("rows", shared, torch.device("cpu"))
        self._source, self._held_out, self._block_size, self._pin = source, held_out, block_size, pin

    def work(self) -> None:
        count = 0
        for planned in self.shared.plan.rows():
            self.shared.rows.reserve(count)
            with self.meter.busy(rows=1):
                prepared = self._read(planned)
            self.shared.rows.put(count, (planned, prepared))
            count += 1
        self.shared.rows.finish(count)

    def _read(self, planned: PlannedRow) -> PreparedRow:
        source = self._held_out if planned.held_out else self._source
        assert source is not None, "the plan has held-out rows only where there are some"
        return PreparedRow.of(source.row(planned.number), self._block_size, pin=self._pin)
