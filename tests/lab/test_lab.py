"""Tests that the lab recovers from a kill at any moment and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.lab import REPOSITORY, Lab, processes_with

pytestmark = pytest.mark.lab


def left_of(lab: Lab) -> list[str]:
    """Whatever of a lab can be found on this machine."""
    found = [str(lab.state)] if lab.state.exists() else []
    found += [f"process {pid}" for pid in processes_with(str(lab.state))]
    found += [str(path) for path in lab.cgroups()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(lab.state) in line]
    found += [line for line in Path("/proc/net/dev").read_text().splitlines() if lab.identity in line]
    return found


@pytest.mark.parametrize("seconds", [0.15, 0.4, 0.7])
def test_up_recovers_from_one_that_was_killed_and_down_leaves_nothing(tmp_path: Path, seconds: float) -> None:
    state = tmp_path / "here" / "state"
    raising = subprocess.Popen([sys.executable, "-m", "tests.lab.lab", "up", "--state", str(state)], cwd=REPOSITORY)
    time.sleep(seconds)  # no promise about where that is: any moment must do
    raising.kill()
    raising.wait()
    lab = Lab(state)
    lab.up()
    try:
        assert lab.healthy()
        assert lab.node("pct", "exec", "200", "--", "hostname").stdout == "ct200\n"
        lab.up()  # a healthy lab stays as it is
    finally:
        lab.down()
    assert left_of(lab) == []
    lab.down()  # nothing to do, and no error


def test_labs_stand_side_by_side(lab: Lab, tmp_path: Path) -> None:
    other = Lab(tmp_path / "other" / "state", tethered=True)
    other.up()
    try:
        other.container("touch", "/only-here")
        assert lab.container("ls", "/only-here", check=False).returncode != 0
        assert other.port != lab.port
        _ = other.far_away
        other.stop_container()
        assert lab.container_pid() is not None
    finally:
        other.down()
    assert left_of(other) == []
    assert lab.healthy()


def test_the_containers_share_the_machines_environment_but_not_its_network(lab: Lab) -> None:
    python = REPOSITORY / ".venv/bin/python"
    assert lab.container(str(python), "-c", "import torch; print(torch.ones(2).sum().item())").stdout == "2.0\n"
    assert lab.container("touch", str(python.parent / "x"), check=False).returncode != 0
    interfaces = lab.container("sh", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1").stdout.split()
    assert interfaces == ["lo"]
