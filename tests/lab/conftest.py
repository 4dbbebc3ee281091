"""Gives tests one lab per test process, `dflash` as a subprocess, and a clean container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab import Lab, why_not
from tests.lab.user import Dflash, clean, make_user


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab of this test process. Where it cannot stand the tests fail with the cure: they are not optional."""
    reason = why_not()
    if reason:
        pytest.fail(reason)
    lab = Lab(tmp_path_factory.mktemp("lab") / "state", tethered=True)
    lab.up()
    yield lab
    lab.down()


@pytest.fixture
def dflash(lab: Lab, tmp_path: Path) -> Iterator[Dflash]:
    """A user's folder with an inventory, and a root folder in the container that only this test uses."""
    user = make_user(lab, tmp_path)
    yield user
    clean(lab, user.root)
