"""What both sides know stands once, and an old Python runs it."""

from __future__ import annotations

from pathlib import PurePosixPath

from dflash_ops.errors import Exit
from dflash_ops.remote import files, protocol
from dflash_ops.run.record import RunPaths


def test_both_sides_name_the_same_files_of_a_run() -> None:
    here, there = RunPaths(PurePosixPath("/srv/runs/r1")), files.RunPaths("/srv", "r1")
    for name in protocol.RUN_FILES:
        assert str(getattr(here, name)) == getattr(there, name)


def test_exit_codes_of_refusals_are_those_of_the_command() -> None:
    names = {"USAGE", "TEMPORARY", "CONFIGURATION", "RUN_FAILED", "RUN_NOT_FOUND"}
    assert {name: getattr(protocol, name) for name in names} == {name: int(Exit[name]) for name in names}
