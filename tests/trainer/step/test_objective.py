"""Losses, gradients, weights and metrics against their definitions in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from trainer.config.sections import ObjectiveConfig
from trainer.step.objective import (
    chunk_gradient,
    decay_gamma,
    slot_order,
    slot_sums,
    slot_weights,
    summarise,
    teacher_positions,
)

SLOTS, HIDDEN, VOCAB = 11, 16, 37


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels_of(count: int) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(9))


def reference_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    teacher: Tensor,
    config: ObjectiveConfig,
    multiplier: float,
    softcap: float | None,
) -> Tensor:
    """The loss of each slot by autograd's own operations."""

    def logits(states: Tensor) -> Tensor:
        raw = states @ head.T * multiplier
        return raw if softcap is None else torch.tanh(raw / softcap) * softcap

    nll = F.cross_entropy(logits(hidden), labels, reduction="none")
    ours, theirs = F.log_softmax(logits(hidden), -1), F.log_softmax(logits(teacher), -1)
    if config.distillation == "none":
        return nll
    if config.distillation == "forward_kl":
        divergence = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    else:
        divergence = 0.5 * (ours.exp() - theirs.exp()).abs().sum(-1)
    return (1 - config.distillation_weight) * nll + config.distillation_weight * divergence


@pytest.mark.parametrize(("multiplier", "softcap"), list(itertools.product([1.0, 0.25], [None, 3.0])))
@pytest.mark.parametrize("distillation", ["none", "forward_kl", "tv"])
def test_chunk_gradient_is_autograds_in_float64(distillation: Any, multiplier: float, softcap: float | None) -> None:
    config = ObjectiveConfig(distillation=distillation, distillation_weight=0.7)
    hidden, head, teacher = normal(SLOTS, HIDDEN, seed=1), normal(VOCAB, HIDDEN, seed=2), normal(SLOTS, HIDDEN, seed=3)
    labels = labels_of(SLOTS)
    ours = chunk_gradient(
        hidden, head, labels, multiplier=multiplier, softcap=softcap, teacher_hidden=teacher, config=config
    )
    exact = hidden.double().requires_grad_()
    loss = reference_loss(exact, head.double(), labels, teacher.double(), config, multiplier, softcap)
    (gradient,) = torch.autograd.grad(loss.sum(), exact)
    torch.testing.assert_close(ours.loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.gradient.double(), gradient, rtol=1e-5, atol=1e-5)
    plain = reference_loss(
        hidden.double(), head.double(), labels, teacher.double(), ObjectiveConfig(), multiplier, softcap
    )
    torch.testing.assert_close(ours.nll.double(), plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.correct, (hidden @ head.T).argmax(-1) == labels)


def test_losses_of_half_precision_states_are_float32_and_close_to_exact() -> None:
    hidden, head, labels = normal(SLOTS, HIDDEN, seed=1), normal(VOCAB, HIDDEN, seed=2), labels_of(SLOTS)
    ours = chunk_gradient(hidden.bfloat16(), head.bfloat16(), labels)
    assert (ours.nll.dtype, ours.gradient.dtype) == (torch.float32, torch.bfloat16)
    exact = chunk_gradient(hidden.bfloat16().float(), head.bfloat16().float(), labels)
    torch.testing.assert_close(ours.gradient.float(), exact.gradient, rtol=0.02, atol=0.05)


def test_gamma_is_the_papers_for_its_block_sizes_and_monotone_between() -> None:
    config = ObjectiveConfig()
    assert [decay_gamma(config, size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    gammas = [decay_gamma(config, size) for size in range(2, 40)]
    assert gammas == sorted(gammas)
    assert decay_gamma(ObjectiveConfig(decay_gamma=2.5), 16) == 2.5


def test_decay_and_uniform_weights_follow_their_formulas_and_are_zero_outside_the_mask() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    nll = torch.ones(2, 3)
    decayed = slot_weights(nll, mask, ObjectiveConfig(decay_gamma=2.0))
    expected = torch.tensor([[1.0, 0.0, math.exp(-1.0)], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(decayed, expected)
    assert torch.equal(slot_weights(nll, mask, ObjectiveConfig(weighting="uniform")), mask.float())


@given(data=st.data(), alpha=st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_dpace_weights_are_the_papers_double_sum_over_the_supervised_slots(data: st.DataObject, alpha: float) -> None:
    drafted = data.draw(st.integers(1, 6))
    nll = data.draw(st.lists(st.floats(0, 9), min_size=drafted, max_size=drafted))
    mask = data.draw(st.lists(st.booleans(), min_size=drafted, max_size=drafted))
    expected = []
    for j in range(drafted):
        total = 0.0
        for m in range(j, drafted):
            reach = math.prod((1 - alpha) * math.exp(-nll[i]) + alpha for i in range(m + 1) if mask[i])
            total += reach if mask[m] else 0.0
        expected.append(total if mask[j] else 0.0)
    config = ObjectiveConfig(weighting="dpace", dpace_alpha=alpha)
    ours = slot_weights(torch.tensor([nll]), torch.tensor([mask]), config)
    torch.testing.assert_close(ours, torch.tensor([expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighting", ["decay", "dpace", "uniform"])
@pytest.mark.parametrize("distillation", ["none", "forward_kl", "tv"])
def test_a_row_in_chunks_has_the_gradient_of_its_weighted_mean_loss(weighting: Any, distillation: Any) -> None:
    config = ObjectiveConfig(weighting=weighting, distillation=distillation)
    anchors, block, chunk = 5, 4, 4
    hidden, teacher = normal(anchors * block, HIDDEN, seed=1), normal(anchors * block, HIDDEN, seed=4)
    head, labels = normal(VOCAB, HIDDEN, seed=2), labels_of(anchors * (block - 1))
    mask = torch.rand(anchors, block - 1, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[0] = True
    order = slot_order(mask, chunk)

    nll, loss, gradient = torch.zeros(mask.numel()), torch.zeros(mask.numel()), torch.zeros_like(hidden)
    for i in range(-(-int(mask.sum()) // chunk)):
        slots, queries = (part[i * chunk : (i + 1) * chunk] for part in order)
        result = chunk_gradient(hidden[queries], head, labels[slots], teacher_hidden=teacher[queries], config=config)
        nll[slots], loss[slots], gradient[queries] = result.nll, result.loss, result.gradient
    weights = slot_weights(nll.view_as(mask), mask, config)
    padded = F.pad(weights, (1, 0))
    ours = gradient * padded.reshape(-1, 1) / weights.sum()

    exact = hidden.double().requires_grad_()
    rows = exact.view(anchors, block, HIDDEN)[:, 1:].reshape(-1, HIDDEN)
    teacher_rows = teacher.double().view(anchors, block, HIDDEN)[:, 1:].reshape(-1, HIDDEN)
    losses = reference_loss(rows, head.double(), labels, teacher_rows, config, 1.0, None)
    objective = (losses.view_as(mask) * weights.double()).sum() / weights.double().sum()
    objective.backward()
    assert exact.grad is not None
    torch.testing.assert_close(ours.double(), exact.grad, rtol=1e-5, atol=1e-6)
    sums = slot_sums(loss.view_as(mask), nll.view_as(mask), mask, mask, weights)
    assert float(sums[0] / sums[1]) == pytest.approx(float(objective.detach()), rel=1e-5)


@given(data=st.data(), chunk=st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_slot_order_puts_supervised_slots_first_in_whole_chunks(data: st.DataObject, chunk: int) -> None:
    anchors, drafted = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    flags = data.draw(st.lists(st.booleans(), min_size=anchors * drafted, max_size=anchors * drafted))
    mask = torch.tensor(flags).view(anchors, drafted)
    slots, queries = slot_order(mask, chunk)
    assert len(slots) == len(queries) == -(-mask.numel() // chunk) * chunk
    valid = int(mask.sum())
    assert slots[:valid].tolist() == torch.nonzero(mask.flatten()).flatten().tolist()
    assert set(slots.tolist()) == set(range(mask.numel()))
    assert queries.tolist() == [s // drafted * (drafted + 1) + s % drafted + 1 for s in slots.tolist()]


def test_teacher_of_a_slot_stands_one_position_before_its_token() -> None:
    assert teacher_positions(torch.tensor([4, 9]), 4).tolist() == [[4, 5, 6], [9, 10, 11]]


def test_accept_length_is_the_mean_prefix_and_not_a_product_of_marginals() -> None:
    correct = torch.tensor([[True, True, True], [False, False, False]])
    mask = torch.ones_like(correct)
    metrics = summarise(slot_sums(torch.ones(2, 3), torch.ones(2, 3), correct, mask, mask.float()))
    assert metrics["accept_length"] == 1 + 3 / 2  # the product of marginals would say 1 + 1/2 + 1/4 + 1/8
    assert metrics["slot_accuracy"] == [0.5, 0.5, 0.5]


def test_accepted_prefix_ends_at_the_first_unsupervised_slot_and_undrafted_blocks_do_not_count() -> None:
    correct = torch.ones(3, 3, dtype=torch.bool)
    mask = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
    metrics = summarise(slot_sums(torch.ones(3, 3), torch.ones(3, 3), correct, mask, mask.float()))
    assert metrics["accept_length"] == 1 + (1 + 2) / 2
    assert metrics["accuracy"] == 1.0


def test_sums_of_rows_pool_before_any_ratio() -> None:
    loss, nll = normal(6, 4, seed=1).abs(), normal(6, 4, seed=2).abs()
    correct, mask, weights = normal(6, 4, seed=3) > 0, normal(6, 4, seed=4) > -0.5, normal(6, 4, seed=5).abs()
    whole = slot_sums(loss, nll, correct, mask, weights)
    parts = [slot_sums(*(t[part] for t in (loss, nll, correct, mask, weights))) for part in (slice(0, 1), slice(1, 6))]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_metrics_without_a_single_slot_are_nan_and_none_not_an_error() -> None:
    empty = torch.zeros(1, 2, dtype=torch.bool)
    metrics = summarise(slot_sums(torch.zeros(1, 2), torch.zeros(1, 2), empty, empty, empty.float()))
    assert math.isnan(metrics["loss"])  # type: ignore[arg-type]
    assert metrics["slot_accuracy"] == [None, None]


@pytest.mark.parametrize("distillation", ["none", "forward_kl", "tv"])
@pytest.mark.parametrize("weighting", ["decay", "dpace", "uniform"])
def test_every_part_traces_into_one_graph(weighting: Any, distillation: Any) -> None:
    config = ObjectiveConfig(weighting=weighting, distillation=distillation)

    def step(hidden: Tensor, head: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        order = slot_order(mask, 3)
        result = chunk_gradient(
            hidden, head, labels[order.slots], softcap=30.0, multiplier=0.5, teacher_hidden=hidden * 2, config=config
        )
        nll = result.nll[: mask.numel()].view_as(mask)
        weights = slot_weights(nll, mask, config)
        return slot_sums(nll, nll, mask, mask, weights) + result.gradient.sum()

    torch.compiler.reset()  # the cases share one function, and Dynamo gives up after eight of them
    mask = torch.tensor([[True, False, True], [True, True, True]])
    inputs = (normal(6, HIDDEN, seed=1), normal(VOCAB, HIDDEN, seed=2), labels_of(6), mask)
    torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(*inputs), step(*inputs))
