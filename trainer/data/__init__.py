"""Documents, their packing into rows, and the anchors."""

from trainer.data.documents import DataError, Documents, DocumentWriter, Statistics
from trainer.data.rows import Row, RowSource

__all__ = ["DataError", "DocumentWriter", "Documents", "Row", "RowSource", "Statistics"]
