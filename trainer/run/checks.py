"""Compares a run with the checkpoint it goes on from, and with what its target is made for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.sections import RunConfig
from trainer.data import RowSource
from trainer.drafter.config import DrafterConfig
from trainer.pretrained import TargetError
from trainer.run.checkpoint import CheckpointError, WholeCheckpoint
from trainer.target.positions import learned_positions
from trainer.wording import count

logger = logging.getLogger(__name__)


BY_LAYERS = ("layer_types", "max_window_layers")  # fields that follow a drafter's number of layers


def refuse_another_drafter(start: WholeCheckpoint, settings: RunConfig, drafter_config: DrafterConfig) -> None:
    """Raise CheckpointError unless weights and optimizer state of the checkpoint fit what is to be trained."""
    old, new = start.drafter_config(), json.loads(json.dumps(drafter_config.to_json("float32")))
    there, here = dict(_leaves(old)), dict(_leaves(new))
    changed = [
        f"drafter {name} is {there.get(name)} there, {value} here"
        for name, value in here.items()
        if there.get(name) != value
        and not (name in BY_LAYERS and there["num_hidden_layers"] != here["num_hidden_layers"])
    ]
    name = start.run()["config"]["optimizer"]["name"]
    if name != settings.optimizer.name:
        changed.append(f"optimizer.name is {name} there, {settings.optimizer.name} here")
    if changed:
        raise CheckpointError(
            f"checkpoint {start.path} is of another drafter or optimizer ({'; '.join(changed)}): "
            "keep what it was trained with, or start a new run in another run directory"
        )


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a drafter's configuration and of the sections in it, which repeat some of them for some engines."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield name, value


def describe_drafter(drafter_config: DrafterConfig, settings: RunConfig) -> str:
    """What is trained on which target."""
    return (
        f"drafter of {count(drafter_config.num_hidden_layers, 'layer')}, blocks of {drafter_config.block_size}, "
        f"reading layers {list(drafter_config.target_layer_ids)} of {settings.target.path}"
    )


def describe_length(settings: RunConfig, source: RowSource, rows: int, total: int) -> str:
    """How many steps of so many rows the run has, and why."""
    limit = settings.optimizer.max_steps
    all_steps = source.total_rows // rows
    epochs = f"{count(settings.data.epochs, 'epoch')} of {count(source.rows_per_epoch, 'row')}"
    if rows > 1:
        epochs += f", {count(rows, 'row')} a step"
    if limit is None:
        return f"{count(total, 'step')}: {epochs}"
    if limit > all_steps:
        return f"{count(total, 'step')}: {epochs} (optimizer.max_steps {limit} is not reached)"
    return f"{count(total, 'step')}, by optimizer.max_steps, of {all_steps}: {epochs}"


def warn_of_length(source: RowSource, target_config: Any) -> None:
    """Say when documents go on where the target was never meant to be. Rows may: positions restart in each document.

    Raises:
        TargetError: the target has no position there at all.
    """
    positions = getattr(target_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and source.shape.longest > positions:
        if learned_positions(target_config) is not None:
            raise TargetError(
                f"the longest document has {source.shape.longest} tokens, but the target has learned {positions} "
                f"positions: set data.max_document_length to {positions}"
            )
        logger.warning(
            "the longest document has %d tokens, the target is made for %d positions (max_position_embeddings): set "
            "data.max_document_length to %d",
            source.shape.longest,
            positions,
            positions,
        )
