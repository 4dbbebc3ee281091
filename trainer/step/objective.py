"""Computes the loss of each slot, the gradient of its hidden state, and how far a block is accepted.

Pure tensor functions of fixed shapes, without a host sync: they compile into one graph and can be captured. The order
of work in a step:

1. `slot_order` puts the supervised slots first, so that only ceil(valid / C) chunks of C slots meet the head: padded
   anchors, unsupervised tokens and slot 0 cost nothing there.
2. `chunk_gradient` computes, for one chunk, the loss of each slot and its gradient with respect to the hidden state.
   Logits exist for C slots at a time and are never computed twice; softmax and losses are float32.
3. `slot_weights` weighs the slots once all losses are known. A weight is one number per slot, so it multiplies finished
   gradients: D-PACE, whose weights depend on the losses, needs no second pass over the head.
4. `slot_sums` gathers numerators and denominators, to be added over rows and drafters before any ratio is taken.
   The gradient of a step is sum(weight * gradient) / sum(weight) over all of them: a globally weighted mean.

Step 2 is written for Inductor: it becomes reductions over the logits and one pass that writes the gradient, rounded,
which the second product reads. Nothing of the size of the logits is written in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config.sections import ObjectiveConfig


class SlotOrder(NamedTuple):
    """The slots of a row, supervised ones first; length N is A*(B-1) rounded up to whole chunks."""

    slots: Tensor
    """[N] int64: index into the flattened [A, B-1] slots. The tail repeats the last: writing it twice is harmless."""
    queries: Tensor
    """[N] int64: index of the same slot among the A*B rows of the drafter's hidden states."""


class ChunkGradient(NamedTuple):
    """What the head says about C slots."""

    nll: Tensor
    """[C] float32: cross-entropy against the labels, whatever the loss."""
    loss: Tensor
    """[C] float32: the loss; equal to nll without distillation."""
    correct: Tensor
    """[C] bool: whether the most likely token is the label."""
    gradient: Tensor
    """[C, H] in the hidden states' dtype: d loss / d hidden of each slot, unweighted."""


def slot_order(label_mask: Tensor, chunk: int) -> SlotOrder:
    """Order the slots of label_mask [A, B-1] for chunks of `chunk`; the first label_mask.sum() are the supervised."""
    drafted = label_mask.shape[1]
    slots = torch.argsort((~label_mask).reshape(-1).to(torch.int8), stable=True)
    padding = -slots.shape[0] % chunk
    slots = torch.cat([slots, slots[-1:].expand(padding)])
    return SlotOrder(slots, slots // drafted * (drafted + 1) + slots % drafted + 1)


def teacher_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Return [A, B-1]: the context position whose target hidden state predicts each slot's token, anchor + k - 1."""
    return anchors[:, None] + torch.arange(block_size - 1, device=anchors.device)


def _logits(hidden: Tensor, head: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """Return float32 logits [C, V]; bfloat16 inputs are multiplied with a float32 result where the device can."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, head.T, out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, head.T).float()
    if multiplier != 1.0:
        logits = logits * multiplier
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


def chunk_gradient(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    teacher_hidden: Tensor | None = None,
    config: ObjectiveConfig | None = None,
) -> ChunkGradient:
    """Return losses and their gradient for hidden [C, H] through the frozen head [V, H].

    With `teacher_hidden` [C, H] (the target's final hidden states at `teacher_positions`) the loss is
    (1 - w) * cross-entropy + w * D, with w = config.distillation_weight and D of config.distillation:
    forward_kl is KL(target || drafter), tv is half the L1 distance of the two distributions.
    """
    logits = _logits(hidden, head, multiplier, softcap)
    label = labels[:, None]
    correct = logits.argmax(dim=-1) == labels
    # log_softmax rather than logsumexp: Inductor takes maximum and sum of the former in one reading of the logits.
    log_probability = torch.log_softmax(logits, dim=-1)
    nll = -log_probability.gather(1, label)[:, 0]
    probability = log_probability.exp()

    # d nll / d logit = probability - onehot. A comparison, not a scatter: it melts into the pass that writes gradients.
    onehot = torch.arange(logits.shape[1], device=labels.device) == label
    loss, gradient = nll, torch.where(onehot, torch.expm1(-nll)[:, None], probability)
    if teacher_hidden is not None and config is not None and config.distillation != "none":
        share = config.distillation_weight
        teacher = torch.log_softmax(_logits(teacher_hidden, head, multiplier, softcap), dim=-1)
        if config.distillation == "forward_kl":
            divergence = (teacher.exp() * (teacher - log_probability)).sum(-1)
            slope = probability - teacher.exp()
        else:
            difference = probability - teacher.exp()
            divergence = 0.5 * difference.abs().sum(-1)
            sign = 0.5 * difference.sign()
            slope = probability * (sign - (probability * sign).sum(-1, keepdim=True))
        loss = (1.0 - share) * nll + share * divergence
        gradient = (1.0 - share) * gradient + share * slope
    if softcap is not None:
        gradient = gradient * (1.0 - (logits / softcap).square())
    if multiplier != 1.0:
        gradient = gradient * multiplier
    return ChunkGradient(nll, loss, correct, torch.mm(gradient.to(hidden.dtype), head))


def decay_gamma(config: ObjectiveConfig, block_size: int) -> float:
    """Return the decay length: the configured one, or the paper's 4, 5, 7 for blocks of 8, 10, 16.

    Between those it is linear in the block size, below 8 half the block, above 16 the block times 7/16.
    """
    if config.decay_gamma is not None:
        return config.decay_gamma
    if block_size <= 10:
        return block_size / 2
    if block_size <= 16:
        return 5.0 + (block_size - 10) / 3
    return block_size * 7 / 16


def slot_weights(nll: Tensor, label_mask: Tensor, config: ObjectiveConfig) -> Tensor:
    """Return the weight of each slot, [A, B-1] float32, zero outside label_mask; no gradient flows through it.

    decay: exp(-(k - 1) / gamma) for slot k = 1 .. B-1 (arXiv 2602.06036). uniform: 1.
    dpace: w_j = sum over m >= j of prod over i <= m of ((1 - a) q_i + a), with q = exp(-nll), a = dpace_alpha
    (arXiv 2605.18810); an unsupervised slot adds no term and no factor.
    """
    mask = label_mask.float()
    if config.weighting == "uniform":
        return mask
    drafted = label_mask.shape[1]
    if config.weighting == "decay":
        slots = torch.arange(drafted, device=nll.device, dtype=torch.float32)
        return mask * torch.exp(-slots / decay_gamma(config, drafted + 1))
    alpha = config.dpace_alpha
    confidence = (1.0 - alpha) * torch.exp(-nll.detach().float()) + alpha
    reach = torch.where(label_mask, confidence, 1.0).cumprod(dim=1) * mask
    return mask * reach.flip(1).cumsum(1).flip(1)


def slot_sums(loss: Tensor, nll: Tensor, correct: Tensor, label_mask: Tensor, weights: Tensor) -> Tensor:
    """Return the sums behind the metrics of one row as one float64 vector, to be added over rows and drafters.

    All inputs are [A, B-1]. Layout: weighted loss, weight, nll, slots, accepted tokens, blocks, then the correct slots
    and the supervised slots at each of the B-1 places.

    Accepted is what greedy decoding would take from a block: its anchor-following tokens up to the first wrong one. A
    block ends at its first unsupervised slot (the document's end, most often), as decoding does at a stop token; blocks
    whose first slot is unsupervised draft nothing and are not counted.
    """
    mask = label_mask.double()
    right = correct.double() * mask
    accepted = right.cumprod(dim=1).sum()
    totals = torch.stack(
        [
            (loss.double() * weights.double()).sum(),
            weights.double().sum(),
            (nll.double() * mask).sum(),
            mask.sum(),
            accepted,
            mask[:, 0].sum(),
        ]
    )
    return torch.cat([totals, right.sum(0), mask.sum(0)])


def summarise(sums: Tensor) -> Mapping[str, float | list[float | None]]:
    """Turn pooled `slot_sums` into metrics: a host read, so not for the step itself.

    `accept_length` counts the anchor-following accepted tokens plus the target's own next one, as the official
    package's acceptance length does: between 1 and B. A ratio without a denominator is nan, in a list None.
    """
    values = [float(value) for value in sums.tolist()]
    loss, weight, nll, slots, accepted, blocks = values[:6]
    drafted = (len(values) - 6) // 2
    correct, counts = values[6 : 6 + drafted], values[6 + drafted :]
    return {
        "loss": loss / weight if weight else float("nan"),
        "nll": nll / slots if slots else float("nan"),
        "accuracy": sum(correct) / slots if slots else float("nan"),
        "accept_length": 1.0 + accepted / blocks if blocks else float("nan"),
        "slot_accuracy": [c / n if n else None for c, n in zip(correct, counts, strict=True)],
    }
