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
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config.sections import CheckpointConfig

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
CONFIG, RUN, MANIFEST = "config.json", "run.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint can't be written or read; the message is one sentence with the cure."""


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint whose files were found whole."""

    path: Path
    step: int
    metrics: dict[str, float]

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
    holds `accept_length` where it is known: `keep.keep_best` goes by it.

    Raises:
        CheckpointError: when the files can't be written; the earlier checkpoints stay.
    """
    final = folder / f"step-{step:08d}"
    unfinished = folder / f".unfinished-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
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

    Raises:
        CheckpointError: when there is none.
    """
    if (path / MANIFEST).exists():
        return read(path)
    for folder in (path / "checkpoints", path):
        if (found := newest_valid(folder)) is not None:
            return found
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    raise CheckpointError(f"no checkpoint in {path}: name a run directory, or a folder step-… with a {MANIFEST}")


def find_drafter(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the folder with the drafter that `path` means and, for a training checkpoint, what it says of its run.

    `path` is an export or released drafter, a checkpoint, or a run directory (its newest checkpoint).
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
    kept = set(whole)
    if keep.keep_best:
        lengths = {path: _accept_length(path) for path in paths}
        known = {path: length for path, length in lengths.items() if length is not None and _is_whole(path)}
        if known:
            kept.add(max(known, key=lambda path: (known[path], _step(path))))
    for path in paths:
        if path not in kept and _step(path) < _step(whole[-1]):
            try:
                _discard(path)
            except OSError as error:
                logger.warning("old checkpoint %s not removed: %s", path, _reason(error))


def _is_whole(path: Path) -> bool:
    """Whether `read` takes it; a checkpoint whose files have not changed is read in full once in a process."""
    stats = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return _was_whole(path, files)


@lru_cache(maxsize=64)
def _was_whole(path: Path, files: tuple[tuple[str, int, int], ...]) -> bool:
    try:
        read(path)
    except CheckpointError as error:
        logger.warning("%s; it takes no place of checkpoint.keep_last", error)
        return False
    return True


def _accept_length(path: Path) -> float | None:
    try:
        return float(_read_json(path / MANIFEST)["metrics"]["accept_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _discard(path: Path) -> None:
    """Remove a checkpoint so that no half of it ever looks like one."""
    doomed = path.with_name(f".discarded-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What a killed process left half-written or half-removed; a run has one writer."""
    for path in [*folder.glob(".unfinished-*"), *folder.glob(".discarded-*")]:
        shutil.rmtree(path)


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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")


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
