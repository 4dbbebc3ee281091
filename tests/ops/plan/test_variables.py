"""A job's variables: read at launch, named when missing, never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.models import Inventory, JobEntry
from dflash_ops.plan.variables import resolve_variables
from tests.ops.jobs import CANARY, planned


def test_a_variable_that_is_no_text_is_named_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t\udcff")
    with pytest.raises(ConfigurationError, match="variable A of job j is not UTF-8 text") as caught:
        resolve_variables("j", JobEntry(config={}, env={"A": "env:TOKEN"}))
    assert "s3cr3t" not in str(caught.value)


def test_secrets_are_in_the_variables_file_and_nowhere_else(inventory: Inventory) -> None:
    asked = planned(inventory)
    assert "TOKEN='s3cr3t-canary-$HOME'\n" in asked.env
    assert "FROM_FILE='of a file'\n" in asked.env
    assert asked.spec["variables"] == ["FROM_FILE", "PLAIN", "TOKEN"]
    elsewhere = repr((asked.spec, asked.argv, asked.entry, asked.on_exit, asked.config, asked))
    assert CANARY not in elsewhere
    assert "of a file" not in elsewhere


def test_a_secret_that_is_missing_is_named_not_guessed(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANARY")
    with pytest.raises(ConfigurationError, match="the variable CANARY"):
        planned(inventory)
    monkeypatch.setenv("CANARY", CANARY)
    (inventory.path.parent / "token").unlink()
    with pytest.raises(ConfigurationError, match="needs the file"):
        planned(inventory)
