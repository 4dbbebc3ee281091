"""Documents, their packing into rows, and the anchors."""

from trainer.data.documents import DataError, Documents, Statistics
from trainer.data.rows import Row, RowShape, RowSource

__all__ = ["DataError", "Documents", "Row", "RowShape", "RowSource", "Statistics"]
