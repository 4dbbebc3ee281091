"""A deadline counts from its last renewal."""

from __future__ import annotations

from dflash_ops.transport.base import (
    Deadline,
)


def test_a_deadline_counts_from_its_last_renewal() -> None:
    deadline = Deadline(1000)
    deadline._end -= 999.5
    assert deadline.remaining() < 1
    deadline.renew()
    assert deadline.remaining() > 999
