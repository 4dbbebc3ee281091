"""Which run is meant: the one that runs, whatever clocks and files say; and units are what runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dflash_ops.remote import files, launch, process, which
from dflash_ops.remote.channel import Refusal
from tests.ops.container import ABSENT, WELL, Container, alive
from tests.ops.evidence import BOOT


def stamped(folder: Path, **fields: object) -> None:
    path = folder / "spec.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_run_that_lives_comes_before_a_newer_one_that_ended(container: Container) -> None:
    container.run("old", alive())
    container.run("new", ABSENT, exit=WELL)
    assert files.run_names(str(container.root))[0] == "new"
    assert which.find_run(str(container.root), None).run == "old"


def test_runs_are_ordered_by_what_they_recorded_and_no_touch_or_clock_step_changes_that(container: Container) -> None:
    now, boot = time.time(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for name, fields in {
        "before-boot": {"created": now + 9e6, "boot_id": BOOT, "monotonic": 9e9},  # a clock that was far ahead
        "first": {"created": now, "boot_id": boot, "monotonic": 1.0},
        "second": {"created": now - 3600, "boot_id": boot, "monotonic": 2.0},  # the clock was put back between
    }.items():
        stamped(container.run(name, ABSENT, exit=WELL), **fields)
    os.utime(container.root / "runs/first/spec.json")
    os.utime(container.root / "runs/before-boot")
    assert files.run_names(str(container.root)) == ["second", "first", "before-boot"]


def test_what_changes_something_takes_none_of_two_live_runs_by_guess(container: Container) -> None:
    container.run("a", alive())
    container.run("b", alive())
    assert which.find_run(str(container.root), None).run in ("a", "b")
    with pytest.raises(Refusal, match="several runs are live: a, b"):
        which.find_run(str(container.root), None, changing=True)


def test_a_run_of_another_root_is_not_missing_but_elsewhere(container: Container) -> None:
    container.units["dflash-r7.service"] = alive(directory="/srv/other/runs/r7")
    with pytest.raises(Refusal, match=r"r7 runs, but not in .*: its unit began in /srv/other/runs/r7") as refusal:
        which.find_run(str(container.root), "r7")
    assert "root" in str(refusal.value.hint)
    assert [one.run for one in which.elsewhere(str(container.root))] == ["r7"]


def test_a_run_whose_directory_was_moved_away_still_holds_its_gpus(container: Container) -> None:
    container.units["dflash-r7.service"] = alive(directory="/gone/runs/r7", Description="dflash run r7 on GPU 0,5")
    for wanted, held in (([5], True), ([1], False)):
        spec = {"gpus": {"target": [], "drafters": wanted}}
        if held:
            with pytest.raises(Refusal, match="the run r7 holds GPU 5"):
                launch._refuse_busy_gpus(str(container.root), spec)  # type: ignore[arg-type]
        else:
            launch._refuse_busy_gpus(str(container.root), spec)  # type: ignore[arg-type]


def test_live_runs_are_read_from_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "dflash-r1.service loaded active running dflash run r1\nnot-ours.service loaded active running x\n"
    shown = (
        "Id=dflash-r1.service\nLoadState=loaded\nActiveState=active\nDescription=dflash run r1 on GPU 0,2\n"
        "ExecStart={ path=/opt/dflash/runs/r1/entry ; argv[]=/opt/dflash/runs/r1/entry ; pid=0 }\nMainPID=17\n"
    )

    def call(argv: list[str], timeout: float, **_: object) -> process.Completed:
        return process.Completed(0, listed if "list-units" in argv else shown, "", None)

    monkeypatch.setattr(process, "call", call)
    monkeypatch.setattr("dflash_ops.remote.systemd.call", call)
    assert which.live_runs() == [which.LiveRun("r1", "dflash-r1.service", "/opt/dflash/runs/r1", {0, 2}, 17)]
