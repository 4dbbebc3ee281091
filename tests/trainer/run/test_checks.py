"""What is checked before a run starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.trainer.tiny_models import SIZES
from trainer.pretrained import TargetError
from trainer.run.checks import warn_of_length


def test_documents_longer_than_the_positions_that_a_target_has_learned_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source: Any = SimpleNamespace(shape=SimpleNamespace(longest=257))
    with pytest.raises(
        TargetError, match=r"has 257 tokens, but .* learned 256 positions: set data.max_document_length"
    ):
        warn_of_length(source, CONFIG_MAPPING["gpt2"](**SIZES))
    warn_of_length(source, CONFIG_MAPPING["llama"](**SIZES))  # reads on, if not well
    assert "set data.max_document_length to 256" in caplog.text
    source.shape.longest = 256
    warn_of_length(source, CONFIG_MAPPING["gpt2"](**SIZES))
