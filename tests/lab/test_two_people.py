"""Tests two people who launch at once: one name is one run, and one GPU is held by one run."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.user import Dflash

pytestmark = pytest.mark.lab

ON_GPU_0 = {"steps": None, "pipeline": {"targets": ["cuda:0"], "drafters": ["cuda:1"]}}
ON_GPU_1 = {"steps": None, "pipeline": {"targets": ["cuda:1"], "drafters": ["cuda:2"]}}
ON_GPU_3 = {"steps": None, "pipeline": {"targets": ["cuda:3"], "drafters": ["cuda:4"]}}


def test_twenty_launches_of_one_name_give_one_run(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    launching = [dflash.start("launch", "job", "--run", "one") for _ in range(20)]
    said = [process.communicate(timeout=240) for process in launching]
    codes = sorted(process.returncode for process in launching)
    assert codes == [0] + [2] * 19, said
    assert dflash.runs() == ["one"]
    pattern = f"-m trainer run {dflash.root}/"
    assert lab.container("pgrep", "-c", "-f", "--", pattern).stdout == "1\n"
    assert dflash.state("one") == "running"


def test_a_launch_onto_held_gpus_is_refused_naming_the_holder(dflash: Dflash) -> None:
    dflash.job("first", config=ON_GPU_0)
    dflash.job("second", config=ON_GPU_1)
    dflash.job("elsewhere", config=ON_GPU_3)
    dflash("launch", "first", "--run", "holder")
    refused = dflash("launch", "second", "--run", "late", code=75)
    assert "holder holds GPU 1" in refused.stderr
    assert dflash.runs() == ["holder"]
    dflash("launch", "elsewhere", "--run", "neighbour")
    dflash("launch", "second", "--run", "late", "--replace")
    assert dflash.state("holder") == "cancelled"
    assert dflash.state("neighbour") == "running"
    assert dflash.state("late") == "running"


def test_the_gpus_of_a_run_that_ended_are_free(lab: Lab, dflash: Dflash) -> None:
    dflash.job("first", config={**ON_GPU_0, "steps": 1})
    dflash.job("second", config=ON_GPU_0)
    with faults.nvidia_smi(lab, "exit 9"):
        dflash("launch", "first", "--run", "gone")
        dflash.wait_state("gone", "succeeded")
        dflash("launch", "second", "--run", "next")
