"""The interpreter of an environment: there already, or named by its lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.plan.interpreter import interpreter
from dflash_ops.verbs.env import build
from dflash_ops.verbs.session import Session


def test_the_place_of_a_locked_environment_follows_its_lock_and_python(session: Session, tmp_path: Path) -> None:
    first = interpreter(session.inventory, "locked", session.paths)
    assert first.lock is not None
    assert first.path == f"{session.root}/env/{first.lock}/bin/python"
    (tmp_path / "lock.txt").write_text("tiny-thing==2.0\n")
    assert interpreter(session.inventory, "locked", session.paths).lock != first.lock
    assert interpreter(session.inventory, "there", session.paths).path == "/opt/venv/bin/python"


def test_a_lock_file_that_is_missing_is_named(session: Session, tmp_path: Path) -> None:
    (tmp_path / "lock.txt").unlink()
    with pytest.raises(ConfigurationError, match=r"lock\.txt of environment locked"):
        interpreter(session.inventory, "locked", session.paths)


def test_the_inventory_in_use_is_named(session: Session) -> None:
    with pytest.raises(UsageError) as caught:
        build(session, "there")
    assert str(session.inventory.path) in caught.value.hint
