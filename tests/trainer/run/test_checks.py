"""A run and the checkpoint that it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.trainer.pipeline import tiny
from tests.trainer.tiny_models import SIZES
from trainer.pretrained import TargetError
from trainer.run.checkpoint import WholeCheckpoint
from trainer.run.checks import warn_of_changes, warn_of_length


@pytest.mark.parametrize(
    ("then", "told"),
    [(2, []), (3, ["optimizer.gradient_accumulation_steps was 3 in the checkpoint, is 2"])],
)
def test_a_key_that_was_renamed_since_the_checkpoint_is_compared_under_its_new_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: int, told: list[str]
) -> None:
    settings = tiny.run_config(optimizer={"gradient_accumulation_steps": 2})
    config = settings.model_dump(mode="json")
    del config["optimizer"]["gradient_accumulation_steps"]
    config["optimizer"]["accumulate"] = then
    document = {"content_hash": "abc", "rows_per_step": 2, "next_row": 8, "config": config}
    (tmp_path / "run.json").write_text(json.dumps(document))
    source: Any = SimpleNamespace(content_hash="abc")
    warn_of_changes(WholeCheckpoint(tmp_path, 4, {}), settings, source, 2)
    assert caplog.messages == told


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
