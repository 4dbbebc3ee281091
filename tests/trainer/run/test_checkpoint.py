"""Checkpoints that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.config.sections import CheckpointConfig
from trainer.run.checkpoint import CheckpointError, WholeCheckpoint, find_drafter, newest_valid, read, resolve, save


def tensors(step: int, size: int = 64) -> dict[str, Tensor]:
    return {"weight": torch.full((size, size), float(step)), "norm.weight": torch.arange(size).float() + step}


def write(
    folder: Path,
    step: int,
    *,
    keep_last: int = 3,
    keep_best: bool = False,
    size: int = 64,
    held_out: str | None = None,
    **metrics: float,
) -> Path:
    return save(
        folder,
        step,
        model=tensors(step, size),
        optimizer=tensors(-step, size),
        drafter_config={"block_size": 8},
        run={"next_row": 2 * step} | ({"held_out": held_out} if held_out else {}),
        metrics=metrics,
        keep=CheckpointConfig(keep_last=keep_last, keep_best=keep_best),
    )


def assert_holds(checkpoint: WholeCheckpoint | None, step: int, size: int = 64) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    for found, expected in ((checkpoint.model(), tensors(step, size)), (checkpoint.optimizer(), tensors(-step, size))):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert checkpoint.run() == {"next_row": 2 * step}
    assert checkpoint.drafter_config() == {"block_size": 8}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", 200, accept_length=2.5)
    assert path.name == "step-00000200"
    checkpoint = newest_valid(tmp_path / "checkpoints")
    assert_holds(checkpoint, 200)
    assert checkpoint is not None
    assert checkpoint.metrics == {"accept_length": 2.5}
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-00000200"}


def test_views_and_transposed_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    options = {"drafter_config": {}, "run": {}, "metrics": {}, "keep": CheckpointConfig()}
    path = save(tmp_path, 1, model={"a": base.T, "b": base[1:]}, optimizer={}, **options)  # type: ignore[arg-type]
    assert torch.equal(read(path).model()["a"], base.T)
    assert torch.equal(read(path).model()["b"], base[1:])


def test_no_checkpoints_is_none_and_no_error(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") is None
    (tmp_path / "step-0000notanumber").mkdir()
    (tmp_path / "step-00000003").write_text("a file, not a folder")
    assert newest_valid(tmp_path) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json", "run.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    victim = write(tmp_path, 2) / name
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(content[:-1])
    else:
        victim.unlink()
    with caplog.at_level(logging.WARNING):
        assert_holds(newest_valid(tmp_path), 1)
    assert "step-00000002" in caplog.text
    assert name in caplog.text


@pytest.mark.parametrize("manifest", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "files": {"x": 3}}'])
def test_a_broken_manifest_is_damage_not_a_crash(tmp_path: Path, manifest: str) -> None:
    write(tmp_path, 1)
    (write(tmp_path, 2) / "manifest.json").write_text(manifest)
    assert_holds(newest_valid(tmp_path), 1)


def test_a_newer_format_is_refused_by_number(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 9}))
    with pytest.raises(CheckpointError, match="format 9"):
        read(path)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, length in ((10, 1.0), (20, 3.0), (30, 2.0), (40, 2.5), (50, 2.4)):
        write(tmp_path, step, keep_last=2, keep_best=True, accept_length=length)
    assert steps(tmp_path) == [20, 40, 50]
    write(tmp_path, 60, keep_last=2, keep_best=True, accept_length=3.5)
    assert steps(tmp_path) == [50, 60]


def test_without_a_length_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=1, keep_best=True)
    assert steps(tmp_path) == [3]


def test_a_run_that_resumed_earlier_leaves_later_checkpoints_until_it_replaces_them(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 30) / "run.json").write_text("rotten")
    write(tmp_path, 20, keep_last=1)
    assert steps(tmp_path) == [20, 30]
    write(tmp_path, 30, keep_last=1)
    assert steps(tmp_path) == [30]
    assert_holds(newest_valid(tmp_path), 30)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_takes_no_place_of_those_that_are_kept(tmp_path: Path, file: str) -> None:
    write(tmp_path, 10)
    for step in (20, 30):
        victim = write(tmp_path, step) / file
        victim.write_bytes(victim.read_bytes()[:-3])
    write(tmp_path, 40, keep_last=2)
    assert steps(tmp_path) == [10, 20, 30, 40]
    (tmp_path / "step-00000040/run.json").write_text("rotten")
    assert_holds(newest_valid(tmp_path), 10)
    write(tmp_path, 50, keep_last=1)
    assert steps(tmp_path) == [50]


def test_the_best_is_the_best_on_held_out_rows_where_some_were_measured_on_the_newest_ones(tmp_path: Path) -> None:
    def measure(step: int, training: float, held_out: float | None, rows: str = "a") -> list[int]:
        metrics = {"accept_length": training} | ({"held_out_accept_length": held_out} if held_out is not None else {})
        write(tmp_path, step, keep_last=1, keep_best=True, held_out=rows, **metrics)
        return steps(tmp_path)

    assert measure(10, 9.0, None) == [10]
    assert measure(20, 2.0, 1.5) == [20]  # by another measure 10 was the best
    assert measure(30, 3.0, 1.2) == [20, 30]
    assert measure(40, 8.0, None) == [20, 40]
    assert resolve(tmp_path / "best").step == 20
    assert measure(50, 4.0, 1.0, "other rows") == [50]


def test_a_damaged_checkpoint_is_never_the_best(tmp_path: Path) -> None:
    write(tmp_path, 10, accept_length=3.0)
    (write(tmp_path, 20, accept_length=9.0) / "run.json").write_text("rotten")
    write(tmp_path, 30, accept_length=1.0)
    write(tmp_path, 40, keep_last=1, keep_best=True, accept_length=1.0)
    assert steps(tmp_path) == [10, 40]


def test_the_checkpoint_that_a_run_resumed_from_is_left_as_it_is(tmp_path: Path) -> None:
    before = write(tmp_path, 10).stat().st_ino
    assert write(tmp_path, 10).stat().st_ino == before
    assert_holds(newest_valid(tmp_path), 10)


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    for name in (".unfinished-step-00000001", ".discarded-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    write(tmp_path, 1)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000001"}


def test_checkpoints_moved_behind_symlinks_never_keep_a_later_one_from_being_saved(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in range(1, 7):
        path = write(folder, step, keep_last=2)
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    assert steps(folder) == [5, 6]
    assert {path.name for path in folder.iterdir()} == {"step-00000005", "step-00000006"}
    assert steps(elsewhere) == [1, 2, 3, 4, 5, 6]  # what was moved away belongs to whom moved it
    assert_holds(newest_valid(folder), 6)


def test_leftovers_that_cannot_be_removed_are_named_and_passed_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".unfinished-step-00000001"
    left.mkdir()

    def busy(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", busy)
        write(tmp_path, 1)
    assert_holds(newest_valid(tmp_path), 1)
    assert f"{left} not removed: Device or resource busy" in caplog.text


def test_a_file_system_that_cannot_flush_folders_is_told_of_once_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, folders = os.fsync, []

    def refusing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            folders.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    for step in (1, 2):
        write(tmp_path, step)
    assert folders
    assert_holds(newest_valid(tmp_path), 2)
    assert caplog.text.count("cannot flush all to the disk") == 1


def test_a_disk_that_fails_to_flush_is_still_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(tmp_path, 1)


def test_the_best_checkpoint_is_asked_for_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step, length in ((1, 2.0), (2, 3.5), (3, float("nan")), (4, 3.0)):
        write(folder, step, keep_best=True, keep_last=2, accept_length=length)
    assert resolve(tmp_path).step == 4
    assert resolve(tmp_path / "best").step == resolve(folder / "best").step == 2
    assert find_drafter(tmp_path / "best")[0] == folder / "step-00000002"
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*elsewhere tells its accepted length: leave out"):
        resolve(tmp_path / "elsewhere" / "best")


def test_numbers_that_json_cannot_hold_are_null(tmp_path: Path) -> None:
    path = write(tmp_path, 1, accept_length=float("nan"), loss=float("inf"))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    document = json.loads((path / "manifest.json").read_text(), parse_constant=refuse)
    assert document["metrics"] == {"accept_length": None, "loss": None}


@pytest.mark.parametrize("deep", ["", "checkpoints", "checkpoints/step-00000007"])
def test_a_checkpoint_a_folder_of_them_and_a_run_directory_all_name_it(tmp_path: Path, deep: str) -> None:
    write(tmp_path / "checkpoints", 7)
    assert_holds(resolve(tmp_path / deep), 7)


def test_a_folder_without_a_checkpoint_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name a run directory"):
        resolve(tmp_path)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of 200 KiB where root may mount one, else a limit of 100 KB a file."""
    if os.geteuid() == 0 and mounted(folder):
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mounted(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_a_full_disk_costs_the_new_checkpoint_only(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with full_disk(folder):
        write(folder, 1)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"step 2 not written .*(disk is full|too large)"):
                write(folder, 2, size=400)
            assert {p.name for p in folder.iterdir()} == {"step-00000001"}
            assert_holds(newest_valid(folder), 1)
        write(folder, 3)  # and once it fits again, all goes on
        assert_holds(newest_valid(folder), 3)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not written"):
        write(tmp_path / "file" / "checkpoints", 1)


def test_a_writer_killed_at_any_instant_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    rng = random.Random(0)
    newest = 0
    for _ in range(20):
        child = os.fork()
        if child == 0:
            for step in range(newest + 1, newest + 1000):
                write(tmp_path, step, keep_last=2, size=128)
            os._exit(0)
        # At least one step each time, whatever the machine's speed; then at any instant of the next ones.
        while not steps(tmp_path) or steps(tmp_path)[-1] == newest:
            time.sleep(0.001)
        time.sleep(0.05 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        names = steps(tmp_path)
        for step in names:
            assert_holds(read(tmp_path / f"step-{step:08d}"), step, size=128)
        assert names[-1] > newest  # never back
        newest = names[-1]
