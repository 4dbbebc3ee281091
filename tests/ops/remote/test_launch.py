"""GPUs are held by one run at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_ops.remote import launch, systemd
from dflash_ops.remote.channel import Refusal
from tests.ops.container import ABSENT, Container, alive

SPEC: Any = {"gpus": {"target": [0], "drafters": [1]}}


def holder(container: Container, unit: dict[str, str]) -> None:
    folder = container.run("r0", unit)
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**spec, "gpus": {"target": [], "drafters": [1]}}))


def test_gpus_of_a_live_run_are_refused(container: Container) -> None:
    holder(container, alive())
    with pytest.raises(Refusal, match="the run r0 holds GPU 1"):
        launch._refuse_busy_gpus(str(container.root), SPEC)


def test_gpus_of_a_run_that_is_gone_are_free(container: Container) -> None:
    holder(container, ABSENT)
    launch._refuse_busy_gpus(str(container.root), SPEC)


def test_a_unit_that_systemd_does_not_name_may_hold_its_gpus(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder(container, alive())
    monkeypatch.setattr(systemd, "show_units", lambda units, timeout=10: {})
    with pytest.raises(Refusal, match="the run r0 holds GPU 1"):
        launch._refuse_busy_gpus(str(container.root), SPEC)
