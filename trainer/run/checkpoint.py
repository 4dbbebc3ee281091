"""Writes checkpoints that survive a kill at any instant: made in a hidden folder, renamed once they are on disk.

    checkpoints/step-00000200/
        model.safetensors      the drafter's fp32 weights under the released names; with config.json it is a drafter
        config.json            the drafter's configuration, as released checkpoints write it
        optimizer.safetensors  moments and step counter
        run.json               run configuration, data cursor and content hash
        manifest.json          size and SHA-256 of the others, the step, the metrics; written last

A checkpoint holds no generator state because training draws nothing from one: rows, anchors and initial weights are
pure functions of seed and row number, so the data cursor is all that a resumed run needs to see what it would have
seen. `newest_valid` reads every byte before it trusts a checkpoint, so a torn or rotten one is passed over.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config.sections import CheckpointConfig
from trainer.wording import finite

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
CONFIG, RUN, MANIFEST = "config.json", "run.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
BEST = "best"  # RUN/best, where there is no such folder, means the run's best checkpoint


class CheckpointError(Exception):
    """A checkpoint can't be written or read; the message is one sentence with the cure."""


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint whose files were found whole."""

    path: Path
    step: int
    metrics: dict[str, float | None]

    def model(self) -> dict[str, Tensor]:
        """The drafter's state_dict, fp32, on the CPU."""
        return load_file(self.path / MODEL)

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's state_dict, on the CPU."""
        return load_file(self.path / OPTIMIZER)

    def drafter_config(self) -> dict[str, Any]:
        """The drafter's configuration, as released checkpoints write it."""
        return _read_json(self.path / CONFIG)

    def run(self) -> dict[str, Any]:
        """What `save` was given as `run`: configuration, data cursor and content hash."""
        return _read_json(self.path / RUN)


def save(
    folder: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    drafter_config: Mapping[str, Any],
    run: Mapping[str, Any],
    metrics: Mapping[str, float],
    keep: CheckpointConfig,
) -> Path:
    """Write the checkpoint of `step` below `folder` and drop those that `keep` no longer wants; returns its path.

    Until the last rename nothing that was there is touched, so a kill or a full disk costs the new one only. `metrics`
    holds `held_out_accept_length` and `accept_length` where they are known: `keep.keep_best` goes by them, see `_best`.

    Raises:
        CheckpointError: when the files can't be written; the earlier checkpoints stay.
    """
    final = folder / f"step-{step:08d}"
    unfinished = folder / f".unfinished-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        unfinished = _free(unfinished)
        if final.exists():
            try:
                return read(final).path  # the run resumed from it: the same state, which must never be absent
            except CheckpointError:
                _discard(final)  # one that the resumed run passed over
        unfinished.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in model.items()}, unfinished / MODEL)
        save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, unfinished / OPTIMIZER)
        _write_json(unfinished / CONFIG, drafter_config)
        _write_json(unfinished / RUN, run)
        files = {path.name: _seal(path) for path in sorted(unfinished.iterdir())}
        manifest = {"format": FORMAT, "step": step, "time": time.time(), "metrics": dict(metrics), "files": files}
        _write_json(unfinished / MANIFEST, manifest)
        _sync(unfinished / MANIFEST)
        _sync(unfinished)
        unfinished.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {step} not written to {folder}: {_reason(error)}") from error
    _prune(folder, step, keep)
    return final


def newest_valid(folder: Path) -> WholeCheckpoint | None:
    """The newest whole checkpoint below `folder`, or None; each damaged one that is passed over is warned of."""
    for path in sorted(_checkpoints(folder), key=_step, reverse=True):
        try:
            return read(path)
        except CheckpointError as error:
            logger.warning("%s; looking for an older one", error)
    return None


def read(path: Path) -> WholeCheckpoint:
    """The checkpoint in `path`, every byte verified.

    Raises:
        CheckpointError: when it is absent, incomplete, damaged, or of a newer format.
    """
    try:
        manifest = _read_json(path / MANIFEST)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {manifest['format']}, this trainer reads {FORMAT}: "
                "use the trainer release that wrote it"
            )
        for name, expected in manifest["files"].items():
            if (size := (path / name).stat().st_size) != expected["bytes"]:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has {size} of {expected['bytes']} bytes")
        for name, expected in manifest["files"].items():
            if _sha256(path / name) != expected["sha256"]:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} does not match its SHA-256")
        return WholeCheckpoint(path, int(manifest["step"]), dict(manifest["metrics"]))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {_reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} can't be read ({error})") from error


def resolve(path: Path) -> WholeCheckpoint:
    """The checkpoint that a person means by `path`: a checkpoint, a folder of them, or a run directory.

    Of several it is the newest whole one; `best` behind the folder asks for the one that `keep_best` keeps.

    Raises:
        CheckpointError: when there is none.
    """
    if path.name == BEST and not path.exists():
        return _best_of(path.parent)
    if (path / MANIFEST).exists():
        return read(path)
    for folder in (path / "checkpoints", path):
        if (found := newest_valid(folder)) is not None:
            return found
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    raise CheckpointError(f"no checkpoint in {path}: name a run directory, or a folder step-… with a {MANIFEST}")


def _best_of(path: Path) -> WholeCheckpoint:
    for folder in (path / "checkpoints", path):
        if (best := _best(_checkpoints(folder))) is not None:
            return read(best)
    raise CheckpointError(f"no checkpoint in {path} tells its accepted length: leave out /{BEST} for the newest one")


def find_drafter(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the folder with the drafter that `path` means and, for a training checkpoint, what it says of its run.

    `path` is an export or released drafter, or what `resolve` takes.
    """
    if (path / "config.json").is_file() and not (path / MANIFEST).exists():
        return path, None
    found = resolve(path)
    return found.path, found.run()


def _prune(folder: Path, newest: int, keep: CheckpointConfig) -> None:
    """Drop what is neither among the newest whole `keep_last` up to step `newest` nor the best.

    Later steps are left alone: a run that resumed below a damaged checkpoint replaces it when it gets there. A damaged
    one takes no place among those that are kept, and goes once it is older than all of them.
    """
    paths = sorted((p for p in _checkpoints(folder) if _step(p) <= newest), key=_step)
    whole: list[Path] = []
    for path in reversed(paths):
        if len(whole) < keep.keep_last and _is_whole(path):
            whole.append(path)
    if not whole:
        return
    kept = set(whole)
    if keep.keep_best and (best := _best(path for path in paths if _is_whole(path))) is not None:
        kept.add(best)
    for path in paths:
        if path not in kept and _step(path) < _step(whole[-1]):
            try:
                _discard(path)
            except OSError as error:
                logger.warning("old checkpoint %s not removed: %s", path, _reason(error))


def _is_whole(path: Path) -> bool:
    """Whether `read` takes it; a checkpoint whose files have not changed is read in full once in a process."""
    try:
        stats = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError:
        return False
    return _was_whole(path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


@lru_cache(maxsize=64)
def _was_whole(path: Path, files: tuple[tuple[str, int, int], ...]) -> bool:
    try:
        read(path)
    except CheckpointError as error:
        logger.warning("%s; it takes no place of checkpoint.keep_last", error)
        return False
    return True


def _best(paths: Iterable[Path]) -> Path | None:
    """The checkpoint with the longest accepted length, of equal ones the newest; None where none tells it.

    Where there are checkpoints with a measurement on held-out rows, it is one of them: one with the newest one's rows.
    """
    paths = sorted(paths, key=_step)
    measured = {path: length for path in paths if (length := _metric(path, "held_out_accept_length")) is not None}
    rows = {path: _held_out_rows(path) for path in measured}
    if measured:
        newest = rows[max(measured, key=_step)]
        known = {path: length for path, length in measured.items() if rows[path] == newest}
    else:
        known = {path: length for path in paths if (length := _metric(path, "accept_length")) is not None}
    return max(known, key=lambda path: (known[path], _step(path))) if known else None


def _metric(path: Path, name: str) -> float | None:
    try:
        value = float(_read_json(path / MANIFEST)["metrics"][name])
        return value if math.isfinite(value) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _held_out_rows(path: Path) -> Any:
    """What names the held-out rows of a checkpoint's run."""
    try:
        return _read_json(path / RUN).get("held_out")
    except (OSError, ValueError, AttributeError):
        return None


def _discard(path: Path) -> None:
    """Remove a checkpoint so that no half of it ever looks like one. Of one behind a symlink only the link goes."""
    doomed = _free(path.with_name(f".discarded-{path.name}"))
    path.rename(doomed)
    _remove(doomed)


def _remove_leftovers(folder: Path) -> None:
    """What a killed process left half-written or half-removed; a run has one writer."""
    for path in [*folder.glob(".unfinished-*"), *folder.glob(".discarded-*")]:
        _remove(path)


def _remove(path: Path) -> None:
    """Clean up; what cannot be removed is named, for it must never keep a checkpoint from being saved."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s not removed: %s", path, _reason(error))


def _free(path: Path) -> Path:
    """The path itself, or with a number behind it where something is in the way that could not be removed."""
    number, free = 0, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _seal(path: Path) -> dict[str, int | str]:
    """Flush a file to the disk and say what it holds."""
    _sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush to the disk, where the file system can: some know no fsync of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
        _warn_of_volatile_files()
    finally:
        os.close(descriptor)


@cache  # said once
def _warn_of_volatile_files() -> None:
    logger.warning("the checkpoints' file system cannot flush all to the disk: the newest may not survive a power cut")


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(finite(document), indent=2, default=str, allow_nan=False) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return document


def _reason(error: OSError | SafetensorError) -> str:
    """Why writing or reading failed, with the cure where there is one. safetensors tells the errno in prose only."""
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC or "(os error 28)" in text:
        return "the disk is full; free some space, earlier checkpoints are untouched"
    if isinstance(error, OSError) and error.filename:
        return f"{text}: {Path(error.filename).name}"
    return text
