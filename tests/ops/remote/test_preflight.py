"""A launch is refused before anything is sent."""

from __future__ import annotations

import sys

import pytest

from dflash_ops.errors import Exit
from dflash_ops.remote import preflight
from dflash_ops.remote.channel import Refusal
from dflash_ops.transport.base import (
    RemoteRefusal,
)
from tests.ops.container import ABSENT, Container, alive


def test_a_name_that_was_used_is_refused_before_anything_is_sent(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "systemd_version", lambda: 252)
    request = {"run": "r1", "gpus": [], "release": "a" * 32, "python": sys.executable, "locked": False}
    for unit, state in ((ABSENT, "ended"), (alive(), "active")):
        if not (container.root / "runs/r1").exists():
            container.run("r1", unit)
        container.units["dflash-r1.service"] = unit
        with pytest.raises(RemoteRefusal, match=rf"r1 is already there \({state}\)") as caught:
            container.session().call("preflight", request)
        assert (caught.value.code, caught.value.reason) == (Exit.USAGE, "taken")
    assert container.session().call("preflight", {**request, "run": "r2"}).value["release"] == "missing"


@pytest.mark.parametrize(
    ("nodes", "held", "said"),
    [
        ([], [0], "the run wants GPU 0 and the container has none"),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], [0], "has none"),
        (["/dev/nvidia3"], [0, 1], "the run wants GPU 0, 1 and the container has 1"),
        (["/dev/nvidia0", "/dev/nvidia1"], [1], ""),
        ([], [], ""),
    ],
)
def test_gpus_that_are_not_there_refuse_the_launch(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], held: list[int], said: str
) -> None:
    monkeypatch.setattr(preflight.glob, "glob", lambda pattern: nodes)
    if not said:
        preflight._refuse_missing_gpus(held)
        return
    with pytest.raises(Refusal, match=said) as caught:
        preflight._refuse_missing_gpus(held)
    assert caught.value.code == 78
    assert "dflash doctor" in caught.value.hint
