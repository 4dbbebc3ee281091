"""Builds our drafter's step as a drafter worker runs it, on random weights and features."""

from __future__ import annotations

import torch
from peers import CLIP_NORM, LEARNING_RATE, PROMPT_SHARE, Shape, Step

from trainer.bench.shapes import Preset
from trainer.bench.shapes import drafter_step as built_step
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import Mode
from trainer.config import RunConfig
from trainer.data.rows import Row
from trainer.step.step import PreparedRow


def preset(shape: Shape) -> Preset:
    """A released-style drafter of this shape: full attention, taps on the first layers of a 36-layer target."""
    return Preset(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=36,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab,
        tied=False,
        taps=tuple(range(1, 1 + shape.features)),
        drafter_layers=shape.layers,
        block=shape.block,
        length=shape.tokens,
        anchors=shape.anchors,
    )


def run_config(shape: Shape, optimizer: str) -> RunConfig:
    """A run whose learning rate stays what the peers' is."""
    return RunConfig.model_validate(
        {
            "target": {"path": "random"},
            "data": {"sources": ["random"], "sequence_length": shape.tokens, "anchors_per_row": shape.anchors},
            "optimizer": {
                "name": optimizer,
                "lr": LEARNING_RATE,
                "clip_norm": CLIP_NORM,
                "schedule": "constant",
                "max_steps": 10_000,
            },
        }
    )


def random_row(shape: Shape, number: int) -> Row:
    """Equal documents, the first part of each unsupervised, anchors drawn evenly over the documents."""
    generator = torch.Generator().manual_seed(number)
    length, each = shape.document_length, shape.anchors // shape.documents
    prompt = int(PROMPT_SHARE * length)
    anchors = [
        document * length + prompt + torch.randperm(length - prompt - 1, generator=generator)[:each].sort().values
        for document in range(shape.documents)
    ]
    starts = torch.arange(shape.documents).repeat_interleave(length) * length
    positions = torch.arange(length).repeat(shape.documents)
    return Row(
        number=number,
        epoch=0,
        input_ids=torch.randint(0, shape.vocab - 1, (shape.tokens,), generator=generator),
        position_ids=positions,
        document_start=starts,
        loss_mask=positions >= prompt,
        anchors=torch.cat(anchors),
        anchor_valid=torch.ones(each * shape.documents, dtype=torch.bool),
    )


def drafter_step(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, mode: Mode, optimizer: str = "adamw"
) -> Step:
    """One optimizer step of one drafter worker over one packed row, prepared as the pipeline prepares it.

    Returns a function that runs a step and returns its loss on the device. Every step copies its row and its
    features into the worker's buffers first, as in a run.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    step = built_step(preset(shape), run_config(shape, optimizer), device)
    generator = torch.Generator(device).manual_seed(1)
    row = PreparedRow.of(random_row(shape, 0), shape.block, pin=device.type == "cuda")
    features = torch.randn(shape.tokens, shape.features * shape.hidden, device=device, dtype=dtype, generator=generator)

    with CompilePhase(mode) as phase, torch.cuda.stream(stream), phase.turn("drafter 0", device, stream) as turn:
        step.prepare(turn)
    for report in phase.reports:
        print(report, flush=True)
    if device.type == "cuda":
        phase.require_compiled()

    def one() -> torch.Tensor:
        with torch.cuda.stream(stream):
            step.load(row.row, features, None)
            step.accumulate(row.valid_slots)
            step.note(tokens=row.tokens, anchors=row.anchors, stop=False)
            step.update()
            sums = step.result
            return sums[0] / sums[1]

    return one
