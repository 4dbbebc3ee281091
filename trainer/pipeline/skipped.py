"""Counts the rows that are skipped because the target's features of them are not finite, and names their documents."""

from __future__ import annotations

import logging
import threading

from trainer.data.rows import RowSource
from trainer.wording import count

log = logging.getLogger(__name__)


class TooManySkippedRowsError(RuntimeError):
    """More rows were skipped than `data.max_skipped_rows` allows."""


class SkippedRows:
    """The rows that this process skipped; safe to use from several threads."""

    def __init__(self, source: RowSource, limit: int) -> None:
        self._source, self._limit = source, limit
        self._lock = threading.Lock()
        self.count = 0

    def add(self, number: int) -> None:
        """Note a row whose update was left out.

        Raises:
            TooManySkippedRowsError: it is one too many.
        """
        with self._lock:
            self.count += 1
            so_far = self.count
        documents = ", ".join(str(document) for document in self._source.documents(number))
        log.warning(
            "row %d is skipped: the target's features of it are not finite; it holds documents %s (0-based, in the "
            "order of data.sources, those left out not counted); %s skipped so far",
            number,
            documents,
            count(so_far, "row"),
        )
        if so_far > self._limit:
            raise TooManySkippedRowsError(
                f"{count(so_far, 'row')} had features that are not finite, the last one row {number} with documents "
                f"{documents}: take these documents out, run the target in another target.dtype, or raise "
                f"data.max_skipped_rows ({self._limit})"
            )
