"""Training and serving see the same thing, shown on a tiny target; `make overfit` shows it on a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.launching import launch
from tests.trainer.overfit import ENOUGH, judge, write_lessons, write_run
from tests.trainer.tiny_models import save_target, tiny_target
from trainer.commands.export import export


@pytest.mark.parametrize(
    ("family", "drafter"), [("llama", {}), ("qwen3", {"sliding_window": 16, "full_attention_layers": [1]})]
)
def test_a_drafter_that_knows_the_answers_by_heart_has_nearly_whole_blocks_accepted_by_the_official_package(
    tmp_path: Path, family: str, drafter: dict[str, object]
) -> None:
    model = tiny_target(family)
    target = save_target(model, tmp_path / "target")
    prompts = [[3, 14, 15, 9, first] for first in (6, 17, 28, 39)]
    lessons = write_lessons(model, prompts, 1 + 5 * 6 + 5)
    assert len({tuple(lesson.answer) for lesson in lessons}) == len(lessons)
    config = write_run(
        tmp_path,
        lessons,
        {
            "target": {"path": str(target), "dtype": "float32"},
            "drafter": {"num_layers": 2, "block_size": 6, "target_layer_ids": [1, 3], **drafter},
            "data": {"sequence_length": 164, "anchors_per_row": 64},
            "objective": {"weighting": "uniform"},
            "optimizer": {"name": "muon", "lr": 4e-3, "max_steps": 100},
            "telemetry": {"every": 20, "tensorboard": False},
        },
    )
    run = launch(config, tmp_path / "run")
    assert run.wait() == 0, run.log
    lengths = judge(model, export(tmp_path / "run", tmp_path / "drafter", dtype="float32"), lessons)
    assert sum(lengths) / len(lengths) >= ENOUGH * 6
