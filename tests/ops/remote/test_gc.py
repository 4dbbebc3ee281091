"""Ages are said in the unit that fits."""

from __future__ import annotations

from dflash_ops.remote.gc import _age


def test_how_long_ago_is_said_in_the_unit_that_fits() -> None:
    assert [_age(seconds) for seconds in (5, 61, 7300, 86400, 3e6)] == [
        "less than a minute",
        "1 minute",
        "2 hours",
        "1 day",
        "34 days",
    ]
