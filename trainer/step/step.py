"""Runs the pieces of one optimizer step on a drafter's device.

`DrafterStep` owns static buffers of the run's one shape (S tokens, A anchors) and the pieces of an optimizer step over
them. In their order:

    load      row and features into the buffers, on the worker's stream
    forward   blocks, masks and the drafter's layers; supervised slots are gathered to the front
    chunk     C slots through the frozen head: losses, and their gradient with respect to the hidden states. The host
              knows from the row how many slots are supervised, so only ceil(valid / C) chunks run; which one it is
              stands in a counter on the device, so one CUDA graph serves them all
    backward  slot weights (they may depend on all losses), the weighted gradient, back through the layers
    update    after the gradient exchange: divide by the weight sum, clip, optimizer, clear the gradients

A held-out row ends in another piece than `backward`:

    measure   slot weights and metric sums, added up in `measured`; no gradient, and nothing that training reads

Gradients and metric sums live in one flat buffer, `exchanged`, which is all that drafters have to add up. Nothing here
asks the device anything; `result` is read later by whoever wants the numbers.

Eager, compiled and graph mode run the same pieces: `prepare` decides by the worker's `Turn` what each piece is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from trainer.compilation.turn import Turn
from trainer.config.sections import ObjectiveConfig, RunConfig
from trainer.data.rows import Row
from trainer.drafter.attention import kernel_options
from trainer.drafter.blocks import dense_mask, flex_tiles, make_blocks
from trainer.drafter.config import DrafterConfig, LayerType
from trainer.drafter.model import DFlashDrafter, Layer, Rotation, Shown, embed_blocks, layer_over_row
from trainer.step.objective import chunk_gradient, slot_order, slot_sums, slot_weights, summarise, teacher_positions
from trainer.step.optim import Optimizer, build_optimizer


def trains_by_flex(device: torch.device) -> bool:
    """Whether flex_attention has a backward there; a CPU uses the dense mask."""
    return device.type == "cuda"


WARM_UP_STEPS = 2  # the first compiles, the second shows that nothing is compiled again


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row with what the host must know of it, counted where nobody waits."""

    row: Row
    valid_slots: int  # supervised slots of valid anchors
    tokens: int  # without padding
    anchors: int  # valid ones

    @classmethod
    def of(cls, row: Row, block_size: int, *, pin: bool) -> PreparedRow:
        """Count; with `pin`, move the row to page-locked memory so that its copies to a GPU need no host wait."""
        blocks = make_blocks(*_tensors(row), block_size=block_size, mask_token_id=0)
        in_document = torch.nonzero(row.document_start != torch.arange(len(row.document_start)))
        tokens = int(in_document[-1]) + 1 if len(in_document) else 0
        if pin:
            row = Row(row.number, row.epoch, *(tensor.pin_memory() for tensor in _tensors(row)))
        return cls(row, int(blocks.label_mask.sum()), tokens, int(row.anchor_valid.sum()))


class Prologue(NamedTuple):
    """What the layers and the head read of a row."""

    embeds: Tensor  # [A*B, H]
    fused: Tensor  # [S, H], with its autograd graph
    rotations: tuple[Rotation, Rotation]  # of the context, of the blocks
    shown: dict[LayerType, Shown]
    labels: Tensor  # [N]
    slots: Tensor  # [N] place in [A, B-1]
    queries: Tensor  # [N] place in [A*B]
    label_mask: Tensor  # [A, B-1]
    teacher: Tensor | None  # [N] place in [S]


class Forward(NamedTuple):
    """What the forward piece leaves for the others; N is A*(B-1) rounded up to whole chunks."""

    hidden: Tensor  # [A*B, H], with its autograd graph
    gathered: Tensor  # [N, H] hidden states of the slots, supervised ones first
    labels: Tensor  # [N]
    slots: Tensor  # [N] place in [A, B-1]
    queries: Tensor  # [N] place in [A*B]
    label_mask: Tensor  # [A, B-1]
    teacher: Tensor | None  # [N] place in [S]


class Pieces(NamedTuple):
    """What runs over the buffers, in the order of the module's docstring."""

    forward: Callable[[], None]
    chunk: Callable[[], None]
    measure: Callable[[], None]
    backward: Callable[[], None]
    update: Callable[[], None]


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The pooled numbers of one optimizer step, read from `DrafterStep.result`."""

    sums: Tensor  # see trainer.objective.slot_sums
    summary: Mapping[str, float | list[float | None]]  # see trainer.objective.summarise
    grad_norm: float
    tokens: int
    anchors: int
    stop: bool  # somebody asked for it


class DrafterStep:
    """One drafter worker's buffers and pieces. Used by one thread, under that thread's stream."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        optimizer: Optimizer,
        objective: ObjectiveConfig,
        *,
        embedding: Tensor,
        head: Tensor,
        sequence_length: int,
        anchors: int,
    ) -> None:
        """Make the buffers on the device of `embedding` [V, H] and `head` [V, H], where the drafter is too.

        On CUDA the compute type is bfloat16 under autocast, on a CPU float32.
        """
        self.drafter, self.optimizer = drafter, optimizer
        self._config, self._objective = drafter.config, objective
        self.device = head.device
        self._on_gpu = self.device.type == "cuda"
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._embedding, self._head = embedding.to(self._dtype), head.to(self._dtype)
        self._length, self._anchors = sequence_length, anchors
        block, hidden = self._config.block_size, self._config.hidden_size
        self._count = anchors * (block - 1)
        self._chunk = min(objective.head_chunk, self._count)
        rounded = -(-self._count // self._chunk) * self._chunk

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self._input_ids = zeros(sequence_length, dtype=torch.int64)
        self._position_ids = zeros(sequence_length, dtype=torch.int64)
        self._document_start = zeros(sequence_length, dtype=torch.int64)
        self._loss_mask = zeros(sequence_length, dtype=torch.bool)
        self._anchor_places = zeros(anchors, dtype=torch.int64)
        self._anchor_valid = zeros(anchors, dtype=torch.bool)
        self._features = zeros(sequence_length, len(self._config.target_layer_ids) * hidden, dtype=self._dtype)
        distils = objective.distillation != "none"
        self._last_hidden = zeros(sequence_length, hidden, dtype=self._dtype) if distils else None
        # Per slot, written by the chunks that run. The others keep old values, which the label mask keeps out.
        self._nll = zeros(rounded, dtype=torch.float32)
        self._loss = zeros(rounded, dtype=torch.float32)
        self._correct = zeros(rounded, dtype=torch.bool)
        self._slot_gradient = zeros(rounded, hidden, dtype=self._dtype)
        self._chunk_number = zeros(1, dtype=torch.int64)
        self._chunk_places = torch.arange(self._chunk, device=self.device)

        parameters = [p for p in drafter.parameters() if p.requires_grad]
        weights = sum(p.numel() for p in parameters)
        self._sum_count = 6 + 2 * (block - 1)  # the length of slot_sums
        self._sums = zeros(self._sum_count, dtype=torch.float64)
        # gradients | slot sums | tokens, anchors, stop
        self.exchanged = zeros(weights + self._sum_count + 3, dtype=torch.float32)
        self.result = zeros(self._sum_count + 3 + 1, dtype=torch.float32)
        """Sums and counts of the step, and the gradient norm; written by `update`. See `read`."""
        self._gradients, self._tail = self.exchanged[:weights], self.exchanged[weights:]
        self.measured = zeros(self._sum_count + 2, dtype=torch.float64)
        """Slot sums of the held-out rows, rows with features that are not finite, rows that were passed over."""
        start = 0
        for parameter in parameters:  # autograd adds into an existing .grad in place
            parameter.grad = self._gradients[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

        self._state: Forward | None = None
        self._run_prologue: Callable[[], Prologue] = self._prologue
        self._run_layer: Callable[..., Tensor] = layer_over_row
        self._run_epilogue: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self._epilogue
        self._run_head: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = self._head_chunk
        self._run_weigh: Callable[..., tuple[Tensor, Tensor]] = self._weigh
        self._flex = False
        self._pieces = Pieces(self._forward, self._one_chunk, self._measure, self._backward, self._update)

    @classmethod
    def build(
        cls,
        config: RunConfig,
        drafter_config: DrafterConfig,
        *,
        embedding: Tensor,
        head: Tensor,
        total_steps: int,
        weights: Mapping[str, Tensor] | None = None,
    ) -> DrafterStep:
        """The step of a run on the device of `head`, with a fresh optimizer; weights None: drawn from the seed."""
        drafter = DFlashDrafter(drafter_config, seed=config.seed if weights is None else None)
        if weights is not None:
            drafter.load_state_dict(weights)
        drafter.to(head.device)
        return cls(
            drafter,
            build_optimizer(drafter.named_parameters(), config.optimizer, total_steps),
            config.objective,
            embedding=embedding,
            head=head,
            sequence_length=config.data.sequence_length,
            anchors=config.data.anchors_per_row,
        )

    # -------------------------------------------------------------------------------------------------- preparation

    def prepare(self, turn: Turn) -> None:
        """Compile, warm up and capture in the calling thread; leaves weights and optimizer as they were.

        Afterwards the step neither compiles nor, in graph mode, launches a kernel by itself.
        """
        if turn.mode != "eager":
            self._run_prologue = turn.compile(self._prologue)
            # The first layer, whose input has no gradient, is of another kind than those behind it.
            self._run_layer = turn.compile(layer_over_row, kinds=True)
            self._run_epilogue = turn.compile(self._epilogue)
            self._run_head = turn.compile(self._head_chunk)
            self._run_weigh = turn.compile(self._weigh)
            # The eager reference uses the dense mask everywhere.
            self._flex = trains_by_flex(self.device)
            for layer in self.drafter.layers:
                cast(Layer, layer).self_attn.kernel_options = kernel_options(self.device, self._config.head_dim)
        schedule = self.optimizer.state_dict()["step"]
        before = schedule.clone()
        self._load_synthetic()
        for _ in range(WARM_UP_STEPS):
            for piece in (self._forward, self._one_chunk, self._measure, self._backward):
                piece()
            # The optimizer runs all its kernels over a gradient that is no number, and changes nothing: a copy of a
            # large drafter's state would take as long as compiling it.
            self.exchanged.fill_(float("nan"))
            self._update()
        # In the order of their replay. `measure` stands before `backward`, which gives the row's memory back.
        self._pieces = Pieces(
            turn.capture("forward", self._forward),
            turn.capture("chunk", self._one_chunk),
            turn.capture("measure", self._measure),
            turn.capture("backward", self._backward),
            turn.capture("update", self._update),
        )
        schedule.copy_(before)
        self.exchanged.zero_()
        self._sums.zero_()
        self.measured.zero_()

    def copy_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The drafter's and the optimizer's state on the CPU, owned by the caller; waits for the device."""
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.drafter.state_dict().items()}
        moments = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.optimizer.state_dict().items()}
        return weights, moments

    def feature_buffers(self) -> tuple[Tensor, Tensor | None]:
        """New buffers of the shapes that `load` takes features and last hidden states in."""
        last_hidden = None if self._last_hidden is None else torch.zeros_like(self._last_hidden)
        return torch.zeros_like(self._features), last_hidden

    @torch.no_grad()
    def _load_synthetic(self) -> None:
        """A row to warm up on: one document, anchors all over it."""
        length, anchors = self._length, self._anchors
        self._position_ids.copy_(torch.arange(length))
        self._document_start.zero_()
        self._loss_mask.fill_(True)
        self._anchor_places.copy_(torch.linspace(0, length - 2, anchors).long())
        self._anchor_valid.fill_(True)

    # ---------------------------------------------------------------------------------------------------- one row

    @torch.no_grad()
    def load(self, row: Row, features: Tensor, last_hidden: Tensor | None) -> None:
        """Copy a row and its features [S, n*H] (and last_hidden [S, H] for distillation) into the buffers.

        On CUDA this only enqueues: the row should be page-locked, and features stay untouched until the copy is done.
        """
        for buffer, tensor in zip(self._row_buffers(), _tensors(row), strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self._features.copy_(features, non_blocking=True)
        if self._last_hidden is not None:
            if last_hidden is None:
                raise ValueError("distillation needs the target's last hidden states")
            self._last_hidden.copy_(last_hidden, non_blocking=True)

    def accumulate(self, valid_slots: int) -> None:
        """Add the gradient sums of the loaded row, which has this many supervised slots."""
        self._run_to_losses(valid_slots)
        self._pieces.backward()

    def measure(self, valid_slots: int, finite: Tensor) -> None:
        """Add the metric sums of the loaded held-out row to `measured`; `finite`, [] bool: were its features?"""
        self._run_to_losses(valid_slots)
        self._pieces.measure()
        self._state = None  # with it the activations
        self.measured[-2].add_(~finite)

    def _run_to_losses(self, valid_slots: int) -> None:
        self._pieces.forward()
        for _ in range(-(-valid_slots // self._chunk)):
            self._pieces.chunk()

    def note(self, *, tokens: int, anchors: int, stop: bool) -> None:
        """Set what this drafter adds to the step's counts; before the exchange."""
        for place, value in zip((-3, -2, -1), (tokens, anchors, stop), strict=True):
            self._tail[place].fill_(float(value))

    def update(self) -> None:
        """Apply what `exchanged` holds, leave the step's numbers in `result`, and clear the gradients."""
        self._pieces.update()

    @property
    def chunk(self) -> int:
        """Slots of one head chunk (C)."""
        return self._chunk

    def pieces(self) -> dict[str, Callable[[], None]]:
        """The pieces by name, for measuring; `accumulate` and `update` are how to train."""
        return self._pieces._asdict()

    def read(self, result: Tensor) -> StepNumbers:
        """What a host copy of `result` says."""
        sums, rest = result[: self._sum_count].double(), result[self._sum_count :].tolist()
        return StepNumbers(sums, summarise(sums), rest[3], int(rest[0]), int(rest[1]), rest[2] > 0)

    def read_measured(self, measured: Tensor) -> tuple[Mapping[str, float | list[float | None]], int, int]:
        """The summary that a host copy of `measured` gives, and its two counts of rows."""
        return summarise(measured[:-2]), int(measured[-2]), int(measured[-1])

    # ----------------------------------------------------------------------------------------------------- pieces

    def _forward(self) -> None:
        self._chunk_number.zero_()
        config = self._config
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._on_gpu):
            row = self._run_prologue()
            hidden = row.embeds
            for layer in self.drafter.layers:
                kind = cast(Layer, layer).layer_type
                hidden = self._run_layer(
                    layer, hidden, row.fused, row.rotations, row.shown[kind], config.block_size, config.kinds[kind]
                )
            hidden, gathered = self._run_epilogue(hidden, row.queries)
        self._state = Forward(hidden, gathered, row.labels, row.slots, row.queries, row.label_mask, row.teacher)

    def _prologue(self) -> Prologue:
        """Compiled. The row in the buffers to what the layers read."""
        config = self._config
        blocks = make_blocks(*self._row_buffers(), block_size=config.block_size, mask_token_id=config.mask_token_id)
        mask_of = flex_tiles if self._flex else dense_mask
        shown = {
            layer_type: Shown(mask_of(blocks, self._length, kind), blocks.anchors, blocks.starts)
            for layer_type, kind in config.kinds.items()
        }
        order = slot_order(blocks.label_mask, self._chunk)
        teacher = None
        if self._last_hidden is not None:
            places = teacher_positions(blocks.anchors, config.block_size).clamp(max=self._length - 1)
            teacher = places.reshape(-1)[order.slots]
        return Prologue(
            embed_blocks(blocks.tokens, self._embedding, config.input_embedding_scale),
            self.drafter.fuse(self._features),
            (self.drafter.rotary(self._position_ids), self.drafter.rotary(blocks.positions)),
            shown,
            blocks.labels.reshape(-1)[order.slots],
            order.slots,
            order.queries,
            blocks.label_mask,
            teacher,
        )

    def _epilogue(self, hidden: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Compiled. Final hidden states [A*B, H], and those of the slots in their order [N, H], without gradient."""
        hidden = self.drafter.norm(hidden).to(self._dtype)
        return hidden, hidden.detach()[queries]

    @torch.no_grad()
    def _one_chunk(self) -> None:
        state = self._loaded()
        places = self._chunk_number * self._chunk + self._chunk_places
        teacher = None
        if state.teacher is not None and self._last_hidden is not None:
            teacher = self._last_hidden[state.teacher[places]]
        nll, loss, correct, gradient = self._run_head(state.gathered[places], state.labels[places], teacher)
        self._nll.index_copy_(0, places, nll)
        self._loss.index_copy_(0, places, loss)
        self._correct.index_copy_(0, places, correct)
        self._slot_gradient.index_copy_(0, places, gradient)
        self._chunk_number += 1

    def _head_chunk(
        self, hidden: Tensor, labels: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compiled. C slots through the head."""
        result = chunk_gradient(
            hidden,
            self._head,
            labels,
            multiplier=self._config.output_multiplier,
            softcap=self._config.final_logit_softcapping,
            teacher_hidden=teacher,
            config=self._objective,
        )
        return result.nll, result.loss, result.correct, result.gradient

    @torch.no_grad()
    def _measure(self) -> None:
        state = self._loaded()
        _, sums = self._run_weigh(state.slots, state.queries, state.label_mask)
        self.measured[:-2] += sums

    def _loaded(self) -> Forward:
        assert self._state is not None, "the forward piece ran"
        return self._state

    def _backward(self) -> None:
        state = self._loaded()
        with torch.no_grad():
            gradient, sums = self._run_weigh(state.slots, state.queries, state.label_mask)
            self._sums += sums
            self._tail[: self._sum_count].copy_(self._sums)
        torch.autograd.backward(state.hidden, gradient)
        self._state = None  # with it the activations

    def _weigh(self, slots: Tensor, queries: Tensor, label_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compiled. The weighted gradient of the hidden states [A*B, H], and the row's metric sums."""
        count = self._count
        slots, queries = slots[:count], queries[:count]  # without the tail, every place comes once

        def in_place(values: Tensor) -> Tensor:
            placed = torch.zeros(count, dtype=values.dtype, device=values.device).index_copy(0, slots, values[:count])
            return torch.where(label_mask, placed.view_as(label_mask), torch.zeros_like(placed.view_as(label_mask)))

        nll, loss, correct = in_place(self._nll), in_place(self._loss), in_place(self._correct)
        weights = slot_weights(nll, label_mask, self._objective)
        weight = weights.reshape(-1)[slots, None]
        weighted = torch.where(weight > 0, self._slot_gradient[:count] * weight, 0.0).to(self._dtype)
        shape = (self._anchors * self._config.block_size, weighted.shape[1])
        gradient = torch.zeros(shape, dtype=weighted.dtype, device=weighted.device).index_copy(0, queries, weighted)
        return gradient, slot_sums(loss, nll, correct, label_mask, weights)

    @torch.no_grad()
    def _update(self) -> None:
        weight_sum = self._tail[1]  # second of slot_sums
        self.optimizer.step(weight_sum.clamp_min(torch.finfo(torch.float32).tiny))
        self.result[:-1].copy_(self._tail)
        self.result[-1].copy_(self.optimizer.grad_norm)
        self.exchanged.zero_()
        self._sums.zero_()

    def _row_buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self._input_ids,
            self._position_ids,
            self._document_start,
            self._loss_mask,
            self._anchor_places,
            self._anchor_valid,
        )


def _tensors(row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return row.input_ids, row.position_ids, row.document_start, row.loss_mask, row.anchors, row.anchor_valid
