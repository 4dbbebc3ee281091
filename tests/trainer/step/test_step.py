"""One row on one device: gradients, sums and state against plain autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.pipeline import tiny
from trainer.compilation.phase import CompilePhase
from trainer.config.sections import ObjectiveConfig
from trainer.data.rows import Row
from trainer.drafter.attention import build_masks
from trainer.drafter.blocks import make_blocks
from trainer.drafter.model import DFlashDrafter, embed_blocks
from trainer.step.objective import slot_weights, teacher_positions
from trainer.step.step import DrafterStep, PreparedRow

CPU = torch.device("cpu")


def make_step(**objective: Any) -> DrafterStep:
    config = tiny.run_config(objective={"head_chunk": 8, **objective})
    generator = torch.Generator().manual_seed(1)
    shape = (tiny.VOCABULARY, tiny.HIDDEN)
    step = DrafterStep.build(
        config,
        tiny.drafter_config(),
        embedding=torch.randn(shape, generator=generator),
        head=0.3 * torch.randn(shape, generator=generator),
        total_steps=10,
    )
    with CompilePhase("eager") as phase, phase.turn("drafter 0", CPU) as turn:
        step.prepare(turn)
    return step


def rows(count: int) -> list[PreparedRow]:
    source = tiny.row_source(tiny.run_config())
    return [PreparedRow.of(source.row(number), tiny.BLOCK, pin=False) for number in range(count)]


def features(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(tiny.LENGTH, 2 * tiny.HIDDEN, generator=generator),
        torch.randn(tiny.LENGTH, tiny.HIDDEN, generator=generator),
    )


def reference(step: DrafterStep, row: Row, number: int, objective: ObjectiveConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Flat gradient sums, weighted loss sum and weight sum of a row, by autograd over all logits at once."""
    config = tiny.drafter_config()
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(step.drafter.state_dict())
    hidden, last_hidden = features(number)
    blocks = make_blocks(
        row.input_ids,
        row.position_ids,
        row.document_start,
        row.loss_mask,
        row.anchors,
        row.anchor_valid,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    made = drafter(
        embed_blocks(blocks.tokens, step._embedding, 1.0),
        hidden,
        row.position_ids,
        blocks.positions,
        build_masks(config, blocks, tiny.LENGTH, flex=False),
    )
    slots = made.view(tiny.ANCHORS, tiny.BLOCK, tiny.HIDDEN)[:, 1:]
    log_probability = F.log_softmax(slots @ step._head.T, dim=-1)
    nll = -log_probability.gather(2, blocks.labels[..., None])[..., 0]
    loss = nll
    if objective.distillation == "forward_kl":
        places = teacher_positions(blocks.anchors, config.block_size).clamp(max=tiny.LENGTH - 1)
        teacher = F.log_softmax(last_hidden[places] @ step._head.T, dim=-1)
        divergence = (teacher.exp() * (teacher - log_probability)).sum(-1)
        loss = (1 - objective.distillation_weight) * nll + objective.distillation_weight * divergence
    weights = slot_weights(nll.detach(), blocks.label_mask, objective)
    total = (loss * weights).sum()
    total.backward()
    return torch.cat([p.grad.flatten() for p in drafter.parameters()]), total.detach(), weights.sum()


@pytest.mark.parametrize(
    "objective",
    [{}, {"weighting": "dpace"}, {"weighting": "uniform", "distillation": "forward_kl", "distillation_weight": 0.3}],
)
def test_gradient_and_sums_equal_autograd_over_all_logits_at_once(objective: dict[str, Any]) -> None:
    step = make_step(**objective)
    expected = torch.zeros(0)
    for number, prepared in enumerate(rows(2)):
        hidden, last_hidden = features(number)
        gradient, loss, weight = reference(step, prepared.row, number, ObjectiveConfig(**objective))
        expected = gradient if number == 0 else expected + gradient
        before = step.exchanged.clone()
        step.load(prepared.row, hidden, last_hidden)
        step.accumulate(prepared.valid_slots)
        torch.testing.assert_close(step.exchanged[: len(expected)], expected, atol=3e-6, rtol=3e-5)
        tail = (step.exchanged - before)[len(expected) :]
        torch.testing.assert_close(tail[0], loss, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(tail[1], weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("valid_anchors", "chunks"), [(1, 1), (2, 1), (3, 2), (8, 3)])
def test_only_the_chunks_that_hold_supervised_slots_meet_the_head(valid_anchors: int, chunks: int) -> None:
    step = make_step()
    ran = 0
    chunk = step._pieces.chunk

    def counted() -> None:
        nonlocal ran
        ran += 1
        chunk()

    step._pieces = step._pieces._replace(chunk=counted)
    row = Row(  # one document, and anchors whose blocks end inside it: every slot of a valid anchor is supervised
        number=0,
        epoch=0,
        input_ids=torch.arange(tiny.LENGTH) % tiny.VOCABULARY,
        position_ids=torch.arange(tiny.LENGTH),
        document_start=torch.zeros(tiny.LENGTH, dtype=torch.int64),
        loss_mask=torch.ones(tiny.LENGTH, dtype=torch.bool),
        anchors=torch.arange(tiny.ANCHORS) * ((tiny.LENGTH - tiny.BLOCK) // tiny.ANCHORS),
        anchor_valid=torch.arange(tiny.ANCHORS) < valid_anchors,
    )
    prepared = PreparedRow.of(row, tiny.BLOCK, pin=False)
    assert prepared.valid_slots == valid_anchors * (tiny.BLOCK - 1)
    step.load(prepared.row, *features(0))
    step.accumulate(prepared.valid_slots)
    assert ran == chunks


def test_a_measured_row_leaves_gradients_and_sums_as_they_are_and_keeps_no_activations() -> None:
    used, fresh = make_step(), make_step()
    row, held_out = rows(2)
    for number, step in enumerate((used, fresh)):
        step.load(row.row, *features(0))
        step.accumulate(row.valid_slots)
        if number == 0:
            step.load(held_out.row, *features(1))
            step.measure(held_out.valid_slots, torch.tensor(True))
            assert step._state is None
        step.load(row.row, *features(2))
        step.accumulate(row.valid_slots)
    assert torch.equal(used.exchanged, fresh.exchanged)
    fresh.exchanged.zero_()
    fresh._sums.zero_()
    fresh.load(held_out.row, *features(1))
    fresh.accumulate(held_out.valid_slots)
    assert torch.equal(used.measured[:-2], fresh._sums)
    assert used.measured[-2:].tolist() == [0, 0]


def test_what_an_earlier_row_left_in_the_slots_that_do_not_run_changes_nothing() -> None:
    used, fresh = make_step(), make_step()
    used._nll.fill_(float("nan"))
    used._loss.fill_(float("inf"))
    used._slot_gradient.fill_(float("nan"))
    for step in (used, fresh):
        prepared = rows(1)[0]
        step.load(prepared.row, *features(0))
        step.accumulate(prepared.valid_slots)
    assert torch.equal(used.exchanged, fresh.exchanged)


def test_preparing_leaves_weights_optimizer_and_gradients_as_they_were() -> None:
    step = make_step()
    assert all(
        torch.equal(tensor, weight)
        for tensor, weight in zip(
            step.drafter.state_dict().values(),
            DFlashDrafter(tiny.drafter_config(), seed=0).state_dict().values(),
            strict=True,
        )
    )
    assert all(not tensor.any() for tensor in step.optimizer.state_dict().values())
    assert not step.exchanged.any()


def test_an_update_divides_by_the_weights_of_all_rows_and_clears_the_gradients() -> None:
    step = make_step()
    weights = losses = 0.0
    for number, prepared in enumerate(rows(2)):
        _, loss, weight = reference(step, prepared.row, number, ObjectiveConfig())
        losses, weights = losses + float(loss), weights + float(weight)
        step.load(prepared.row, *features(number))
        step.accumulate(prepared.valid_slots)
    gradient = step.exchanged[: -(6 + 2 * (tiny.BLOCK - 1) + 3)].clone()
    step.note(tokens=100, anchors=7, stop=False)
    step.update()
    numbers = step.read(step.result)
    assert numbers.summary["loss"] == pytest.approx(losses / weights, rel=1e-5)
    assert numbers.grad_norm == pytest.approx(float(gradient.norm()) / weights, rel=1e-5)
    assert (numbers.tokens, numbers.anchors, numbers.stop) == (100, 7, False)
    assert not step.exchanged.any()


def test_a_row_without_a_supervised_slot_moves_nothing() -> None:
    step = make_step()
    row = rows(1)[0].row
    empty = replace(row, loss_mask=torch.zeros_like(row.loss_mask), anchor_valid=torch.zeros_like(row.anchor_valid))
    prepared = PreparedRow.of(empty, tiny.BLOCK, pin=False)
    assert (prepared.valid_slots, prepared.anchors) == (0, 0)
    before = step.copy_state()[0]
    step.load(empty, *features(0))
    step.accumulate(prepared.valid_slots)
    step.update()
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.drafter.state_dict().items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_preparing_leaves_weights_moments_and_schedule_as_they_were(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.run_config(optimizer={"name": optimizer, "weight_decay": 0.1})
    table = torch.randn(tiny.VOCABULARY, tiny.HIDDEN)
    step = DrafterStep.build(config, tiny.drafter_config(), embedding=table, head=table, total_steps=6)
    for tensor in step.optimizer.state_dict().values():  # as a resumed run has them
        tensor.copy_((torch.rand(tensor.shape) * 9).ceil())
    weights, moments = step.copy_state()
    updates = []
    own = step.optimizer.step

    def watched(*arguments: Any) -> None:
        updates.append(arguments)
        own(*arguments)

    monkeypatch.setattr(step.optimizer, "step", watched)
    with CompilePhase("eager") as phase, phase.turn("drafter 0", CPU) as turn:
        step.prepare(turn)
    assert updates  # of all kernels, the optimizer's too, none runs for the first time in the first step
    for mine, right in zip(step.copy_state(), (weights, moments), strict=True):
        assert mine.keys() == right.keys()
        assert [name for name in right if not torch.equal(mine[name], right[name])] == []
    assert not step.exchanged.any()


def test_tokens_are_counted_without_padding() -> None:
    for prepared in rows(3):
        row = prepared.row
        padding = sum(1 for i in range(tiny.LENGTH) if int(row.document_start[i]) == i and not row.loss_mask[i])
        assert prepared.tokens == tiny.LENGTH - padding
