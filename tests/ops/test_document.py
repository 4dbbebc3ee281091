"""Every `--json` answer says which command it answers."""

from __future__ import annotations

import importlib

import pytest

from dflash_ops.document import Document


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("launch", "launch.LaunchReport"),
        ("status", "status.Status"),
        ("kill", "kill.KillReport"),
        ("runs", "runs.Runs"),
        ("wait", "wait.Waited"),
        ("diff", "diff.Comparison"),
        ("doctor", "doctor.Diagnosis"),
        ("checkpoint", "checkpoint.Saved"),
        ("pull", "pull.Pulled"),
        ("push", "push.Pushed"),
        ("env-list", "env.EnvironmentList"),
        ("env-build", "env.BuildReport"),
        ("env-uses", "env.EnvironmentUses"),
        ("gc", "gc.GcReport"),
        ("trust", "trust.TrustReport"),
        ("init", "candidates.Initialized"),
    ],
)
def test_the_kind_of_an_answer_is_its_command(kind: str, model: str) -> None:
    verb, name = model.split(".")
    folder = "run" if verb == "status" else "verbs"
    found: type[Document] = getattr(importlib.import_module(f"dflash_ops.{folder}.{verb}"), name)
    assert found.model_fields["kind"].default == kind


def test_no_answer_is_without_a_kind() -> None:
    for verb in (
        "launch",
        "kill",
        "runs",
        "wait",
        "diff",
        "doctor",
        "checkpoint",
        "pull",
        "push",
        "env",
        "gc",
        "trust",
        "candidates",
        "status",
    ):
        importlib.import_module(f"dflash_ops.verbs.{verb}")
    assert [model.__name__ for model in Document.__subclasses__() if "kind" not in model.model_fields] == []
