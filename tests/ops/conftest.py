"""Tests leave nothing in the home of whoever runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.sshd import server, sshd, via

__all__ = ["own_state_folder", "server", "sshd", "via"]


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder
