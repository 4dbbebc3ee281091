"""A target as far as data needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import chatting
from trainer.config.sections import TargetConfig


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, as far as data needs it: a tokenizer with a template."""
    folder = tmp_path_factory.mktemp("target")
    chatting.save(chatting.tokenizer(), folder)
    return folder


@pytest.fixture
def target(folder: Path) -> TargetConfig:
    return TargetConfig(path=str(folder))
