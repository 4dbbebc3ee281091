"""What was last known of a run is kept on the laptop, per inventory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_ops.run.last_known import last_seen
from dflash_ops.verbs.status import status
from tests.ops.container import Container, alive
from tests.ops.evidence import INVENTORY


def test_containers_of_one_name_in_two_inventories_are_not_mixed_up(container: Container, tmp_path: Path) -> None:
    container.run("r1", alive())
    status(container.session(), "r1")
    assert last_seen(INVENTORY.path, "lab", "r1") is not None
    assert last_seen(tmp_path / "inventory.yaml", "lab", "r1") is None


@pytest.mark.parametrize("damage", ["{}", '["x"]', "3", "{", "\xff"])
def test_a_damaged_memory_of_this_laptop_is_written_anew(container: Container, damage: str) -> None:
    container.run("r1", alive())
    status(container.session(), "r1")
    (kept,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.json")
    kept.write_bytes(damage.encode("latin-1"))
    assert last_seen(INVENTORY.path, "lab", "r1") is None
    status(container.session(), "r1")
    seen = last_seen(INVENTORY.path, "lab", "r1")
    assert seen is not None
    assert seen.state == "running"


def test_a_laptop_that_cannot_write_still_answers(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    container.run("r1", alive())
    assert status(container.session(), "r1").state == "running"
    assert last_seen(INVENTORY.path, "lab", None) is None
