"""How does our drafter step? `trainer.step.DrafterStep` as a drafter worker runs it, on random weights and features."""

from __future__ import annotations

import torch
from peers import CLIP_NORM, LEARNING_RATE, PROMPT_SHARE, Shape, Step

from trainer.compilation.phase import CompilePhase, Mode
from trainer.config.sections import ObjectiveConfig, OptimizerConfig
from trainer.data.rows import Row
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import DFlashDrafter
from trainer.step.optim import build_optimizer
from trainer.step.step import DrafterStep, PreparedRow


def drafter_config(shape: Shape) -> DrafterConfig:
    """A released-style drafter of this shape: full attention, taps on the first layers of a 36-layer target."""
    return DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        num_target_layers=36,
        target_layer_ids=tuple(range(1, 1 + shape.features)),
        block_size=shape.block,
        mask_token_id=shape.vocab - 1,
        layer_types=("full_attention",) * shape.layers,
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
    with torch.device(device):
        drafter = DFlashDrafter(drafter_config(shape), seed=None).to(device)
    generator = torch.Generator(device).manual_seed(1)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    table = torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype).normal_(std=0.02, generator=generator)
    head = torch.empty_like(table).normal_(std=0.02, generator=generator)
    settings = OptimizerConfig(name=optimizer, lr=LEARNING_RATE, clip_norm=CLIP_NORM, schedule="constant")  # type: ignore[arg-type]
    step = DrafterStep(
        drafter,
        build_optimizer(drafter.named_parameters(), settings, 10_000),
        ObjectiveConfig(),
        embedding=table,
        head=head,
        sequence_length=shape.tokens,
        anchors=shape.anchors,
    )
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
