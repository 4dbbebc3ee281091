"""A unit is over when systemd says so; what systemd does not say is never taken for an end."""

from __future__ import annotations

import pytest

from dflash_ops.remote.systemd import is_over


@pytest.mark.parametrize(
    ("unit", "over"),
    [
        ({"LoadState": "not-found", "ActiveState": "inactive"}, True),
        ({"LoadState": "loaded", "ActiveState": "failed"}, True),
        ({"LoadState": "loaded", "ActiveState": "inactive"}, True),
        ({"LoadState": "loaded", "ActiveState": "active"}, False),
        ({"LoadState": "loaded", "ActiveState": "deactivating"}, False),
        ({"LoadState": "masked", "ActiveState": "active"}, False),
        ({}, False),
    ],
)
def test_a_unit_is_over_only_when_systemd_says_so(unit: dict[str, str], over: bool) -> None:
    assert is_over(unit) is over
