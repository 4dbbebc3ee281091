"""Documents, their packing into rows, and the anchors."""

from trainer.data.documents import DataError, Documents, Statistics
from trainer.data.rows import Row, RowSource

__all__ = ["DataError", "Documents", "Row", "RowSource", "Statistics"]
