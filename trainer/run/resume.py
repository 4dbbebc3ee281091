"""Compares a run with the checkpoint it resumes from: says all that differs, and keeps its place and its schedule."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.sections import RENAMED_KEYS, RunConfig
from trainer.data import RowSource
from trainer.run.checkpoint import CheckpointError, WholeCheckpoint
from trainer.step.optim import Schedule

logger = logging.getLogger(__name__)

# Fields that change no loss.
UNIMPORTANT = (
    "checkpoint.",
    "telemetry.",
    "data.cache_dir",
    "data.held_out",  # what it takes from the training rows shows in the data's hash
    "data.max_skipped_rows",
    "optimizer.on_schedule_change",
    "pipeline.compile_cache",
    "pipeline.queue_depth",
    "pipeline.stop_seconds",
)
JUMP = 0.01  # a learning rate that changes by a smaller share does not jump
SAMPLES, SAMPLE_BYTES = 256, 4096  # of a weight file: reading all of a large target would take minutes
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def facts(settings: RunConfig, source: RowSource, target_config: Any, processes: int, drafters: int) -> dict[str, Any]:
    """What a checkpoint notes of its run beside the configuration, for `differences`."""
    return {
        "the target's files": target_digest(settings.target.path, target_config),
        "the data": source.content_hash,
        "rows an epoch": source.rows_per_epoch,
        "processes": processes,
        "drafters": drafters,
        "rows a step": drafters * settings.optimizer.gradient_accumulation_steps,
    }


def held_out_name(held_out: RowSource, settings: RunConfig) -> str:
    """Name what is measured: checkpoints are compared only by the same rows."""
    return f"{settings.data.held_out_rows} of {held_out.content_hash}"


def target_digest(path: str, target_config: Any) -> str | None:
    """Name a target's content: a hub commit, or a digest of the configuration and of samples of the weights."""
    folder = Path(path)
    if not folder.is_dir():
        return getattr(target_config, "_commit_hash", None)
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(found for pattern in WEIGHTS for found in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for number in range(SAMPLES):
                opened.seek(number * size // SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def differences(before: Mapping[str, Any], settings: RunConfig, now: Mapping[str, Any]) -> list[str]:
    """All that keeps a resumed run from repeating an undisturbed one, a phrase each; `before`: `Checkpoint.run()`."""
    old = {RENAMED_KEYS.get(name, name): value for name, value in _fields(before["config"])}
    found = [
        f"{name} was {_text(old[name])}, is {_text(value)}"
        for name, value in _fields(settings.model_dump(mode="json"))
        if name in old and old[name] != value and not name.startswith(UNIMPORTANT)
    ]
    noted = before.get("facts", {})
    for name, value in now.items():
        was = noted.get(name)
        if was is None or was == value:
            continue
        hashed = isinstance(value, str)
        found.append(f"{name} changed" if hashed else f"{name}: {was} before, {value} now")
    return found


def warn_of_differences(start: WholeCheckpoint, settings: RunConfig, now: Mapping[str, Any]) -> None:
    """Say in one line what differs: the run goes on, but not with the losses of an undisturbed one."""
    if found := differences(start.run(), settings, now):
        logger.warning("since the checkpoint something changed, so losses differ from here on: %s", "; ".join(found))


def refuse_later(start: WholeCheckpoint, total_rows: int, last_step: int) -> None:
    """Raise CheckpointError for a checkpoint that lies behind this run's end."""
    row = start.run()["next_row"]
    if row > total_rows:
        raise CheckpointError(
            f"checkpoint {start.path} is at row {row}, past this run's {total_rows} rows: "
            "raise data.epochs, or take another run directory"
        )
    if start.step > last_step:
        raise CheckpointError(
            f"checkpoint {start.path} is at step {start.step}, past this run's last step {last_step}: "
            "raise optimizer.max_steps, or take another run directory"
        )


def resumed_schedule(start: WholeCheckpoint, settings: RunConfig, *, rows_per_step: int, last_step: int) -> Schedule:
    """The checkpoint's schedule, whatever the batch; this run's own where that makes no jump or is asked for.

    Raises:
        CheckpointError: the learning rate would jump, and `optimizer.on_schedule_change` does not say what to do.
    """
    before, optimizer = start.run(), settings.optimizer
    row = before["next_row"]
    new = Schedule(row + (last_step - start.step) * rows_per_step, rows_per_step)
    if before.get("schedule") is None:  # an earlier version wrote it
        return new
    old = Schedule(**before["schedule"])
    if abs(new.rows - old.rows) < max(rows_per_step, old.rows_per_step):  # rows that fill no step are left out
        return old
    was, will = (optimizer.lr * schedule.multiplier(row, optimizer) for schedule in (old, new))
    change = f"the checkpoint's schedule ends at row {old.rows}, this run's at row {new.rows}"
    if abs(will - was) <= JUMP * was:
        logger.warning("%s: adopted, for the learning rate does not jump", change)
        return new
    rates = f"learning rate at row {row}: {was:.3g} by the checkpoint's schedule, {will:.3g} by this run's"
    if optimizer.on_schedule_change == "refuse":
        raise CheckpointError(
            f"the learning rate would jump from {was:.3g} to {will:.3g}: {change}, since data.epochs, "
            "optimizer.max_steps, the data or the batch changed. Set optimizer.on_schedule_change to keep (the "
            "checkpoint's schedule, then its last rate) or adopt (this run's, with the jump)"
        )
    logger.warning("%s; %s; optimizer.on_schedule_change: %s", change, rates, optimizer.on_schedule_change)
    return old if optimizer.on_schedule_change == "keep" else new


def _fields(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and not prefix:
            yield from _fields(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
