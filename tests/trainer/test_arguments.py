"""Command lines are read alike in every command."""

from __future__ import annotations

import pytest

from trainer.arguments import read


@pytest.mark.parametrize(
    ("words", "option", "values"),
    [
        (["run", "x.yaml", "--run-dir", "y"], "--set", ["a=1", "b=2", "c=3"]),
        (["regenerate", "x.yaml", "--output", "y"], "--prompts", ["a", "b", "c"]),
        (["evaluate", "x"], "--prompts", ["a", "b", "c"]),
        (["evaluate", "x"], "--template-option", ["a=1", "b=2", "c=3"]),
        (["warmup", "x.yaml"], "--devices", ["a", "b", "c"]),
        (["bench", "pipeline"], "--targets", ["a", "b", "c"]),
        (["bench", "pipeline"], "--drafters", ["a", "b", "c"]),
        (["bench", "first-step"], "--drafters", ["a", "b", "c"]),
    ],
)
def test_an_option_takes_several_values_and_may_come_several_times(
    words: list[str], option: str, values: list[str]
) -> None:
    name = option.removeprefix("--").replace("-", "_")
    together = getattr(read([*words, option, *values]), name)
    assert len(together) == 3
    assert getattr(read([*words, option, *values[:2], option, values[2]]), name) == together
    assert getattr(read([*words, *(word for value in values for word in (option, value))]), name) == together
