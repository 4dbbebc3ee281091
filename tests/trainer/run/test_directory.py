"""A run directory has one run and one process at a time."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from trainer.run.checkpoint import CheckpointError, WholeCheckpoint
from trainer.run.directory import RunDirectory, RunDirectoryError


def checkpoint_of(folder: Path, run_id: str | None) -> WholeCheckpoint:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
    return WholeCheckpoint(folder, 3, {})


def lock_and_exit(path: Path) -> None:
    RunDirectory(path)


def refused(path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"another process trains in .*take another run directory"):
        RunDirectory(path)


def in_another_process(work: object, path: Path) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=work, args=(path,))  # type: ignore[arg-type]
    process.start()
    process.join(30)
    return process.exitcode


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    assert in_another_process(lock_and_exit, tmp_path) == 0
    directory = RunDirectory(tmp_path)
    assert in_another_process(refused, tmp_path) == 0
    assert directory.path == tmp_path


def test_a_checkpoint_of_another_run_is_refused_with_the_cure(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    own = checkpoint_of(tmp_path / "own", directory.identify(None))
    again = RunDirectory(tmp_path)
    again.require_own(own)
    again.require_own(checkpoint_of(tmp_path / "of an earlier version", None))
    with pytest.raises(CheckpointError, match=r"is another run's: move it out of .*--resume-from"):
        again.require_own(checkpoint_of(tmp_path / "foreign", "0123"))


def test_a_directory_whose_identity_was_lost_takes_that_of_its_newest_checkpoint(tmp_path: Path) -> None:
    own = checkpoint_of(tmp_path / "own", "0123")
    directory = RunDirectory(tmp_path)
    directory.require_own(own)
    assert directory.identify(own) == "0123"
    assert RunDirectory(tmp_path).identify(None) == "0123"
