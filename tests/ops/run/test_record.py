"""Run names are of one form."""

from __future__ import annotations

import pytest

from dflash_ops.errors import UsageError
from dflash_ops.inventory.models import Inventory
from tests.ops.jobs import planned


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a b", "a/b", "..", "a\n", "é", "a" * 64, "a;b", "$x"])
def test_what_is_not_a_run_name_is_refused(inventory: Inventory, name: str) -> None:
    with pytest.raises(UsageError, match="not a run name"):
        planned(inventory, run=name)
