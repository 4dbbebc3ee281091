"""Updates the drafter's weights with AdamW or Muon, clipped, under a schedule, all on the device.

`Optimizer.step` runs device operations only: the schedule is a table on the device, indexed by a step counter on the
device, and clipping needs no answer from the host. So it can be captured in a CUDA graph, and every tensor that it
reads or writes keeps its address for life (`load_state_dict` copies into place).

The parameters are the fp32 masters: compute casts them down under autocast, and nothing else holds a copy.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) updates every matrix and AdamW the rest. An
orthogonal update of an [r, c] matrix is scaled by `sqrt(max(1, r / c))`, the original rule, the same that
torch.optim.Muon applies by default; with it a peak rate of ten times AdamW's moves the weights of a model some
thousands wide by about as much as AdamW does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.config.sections import OptimizerConfig

ADAMW_EPSILON = 1e-8
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Matrices of one shape are orthogonalised together, up to this many elements at a time: enough to fill a GPU with the
# small ones, and a bound on the scratch memory of the large ones (about 2.5 GiB with the fp32 stacks).
MUON_BATCH_ELEMENTS = 1 << 27


class OptimizerStateError(Exception):
    """A saved state does not belong to this optimizer."""


def schedule_multiplier(step: float, total_steps: float, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (0-based) as a share of the peak.

    Warm-up is linear and its last step has the full rate. After it, `cosine` falls along half a cosine and `wsd` stays
    at the peak until a linear fall in the last `decay_ratio` of the steps; both come down to `min_lr_ratio`, which the
    step after the last would have.
    """
    warmup = round(config.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        height = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        decay = min(max(1, round(config.decay_ratio * total_steps)), max(1, total_steps - warmup))
        height = 1.0 - min(1.0, max(0, step - (total_steps - decay)) / decay)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where the learning-rate schedule ends, counted in rows: a run goes on along it whatever its batch becomes."""

    rows: int
    """The row at which it ends"""
    rows_per_step: int
    """Of the run that began it; warm-up and decay are rounded to steps of that size"""

    def multiplier(self, row: int, config: OptimizerConfig) -> float:
        """Learning rate of the step that begins at `row`, as a share of the peak."""
        return schedule_multiplier(row / self.rows_per_step, self.rows / self.rows_per_step, config)


def newton_schulz(matrices: Tensor) -> Tensor:
    """The nearly orthogonal factor of each of `matrices` [n, r, c] with r <= c, in their dtype.

    Five steps of the quintic iteration: singular values end up in about 0.7 to 1.2, which is what Muon asks for.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x: Tensor = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class UpdateRule(Protocol):
    """One way to update some of the parameters."""

    def update(self, multiplier: Tensor, divisor: Tensor, finite: Tensor) -> None:
        """Update in place at `multiplier` times the peak rate, from the gradients divided by `divisor`.

        Nothing changes when `finite` is 0.0 (it is 1.0 or 0.0). All three are scalars on the parameters' device.
        Gradients may be overwritten.
        """

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Names and live tensors of the state."""


class AdamW:
    """torch's fused AdamW over parameters that share one weight decay."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, weight_decay: float) -> None:
        self._names = list(parameters)
        self._parameters: list[Tensor] = list(parameters.values())
        self._first_moments = [torch.zeros_like(p) for p in self._parameters]
        self._second_moments = [torch.zeros_like(p) for p in self._parameters]
        device = self._parameters[0].device
        # The kernel advances a counter per parameter, and skips it when the gradient was not finite.
        self._counts = torch.zeros(len(self._parameters), dtype=torch.float32, device=device)
        self._peak = torch.tensor(config.lr, dtype=torch.float32, device=device)
        self._betas = config.betas
        self._weight_decay = weight_decay

    def update(self, multiplier: Tensor, divisor: Tensor, finite: Tensor) -> None:
        adamw(
            self._parameters,
            _gradients(self._names, self._parameters),
            self._first_moments,
            self._second_moments,
            [],
            list(self._counts.unbind()),
            fused=True,
            capturable=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=self._peak * multiplier,
            weight_decay=self._weight_decay,
            eps=ADAMW_EPSILON,
            maximize=False,
            grad_scale=divisor,
            found_inf=1.0 - finite,
        )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, first, second, count in zip(
            self._names, self._first_moments, self._second_moments, self._counts.unbind(), strict=True
        ):
            yield f"{name}.exp_avg", first
            yield f"{name}.exp_avg_sq", second
            yield f"{name}.count", count


class Muon:
    """Muon with Nesterov momentum, batched over matrices of one shape (a tall one counts as its transpose)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        by_shape: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            by_shape[min(parameter.shape), max(parameter.shape)].append(name)
        self._batches: list[tuple[list[str], list[Tensor], Tensor, Tensor]] = []
        for (short, long), names in by_shape.items():
            size = max(1, MUON_BATCH_ELEMENTS // (short * long))
            for start in range(0, len(names), size):
                batch = names[start : start + size]
                members: list[Tensor] = [parameters[name] for name in batch]
                scales = torch.tensor(
                    [math.sqrt(max(1.0, p.shape[0] / p.shape[1])) for p in members], dtype=members[0].dtype
                ).to(members[0].device)
                momentum = torch.zeros(len(batch), short, long, dtype=members[0].dtype, device=members[0].device)
                self._batches.append((batch, members, scales[:, None, None], momentum))
        device = next(iter(parameters.values())).device
        peak = config.muon_lr if config.muon_lr is not None else 10 * config.lr
        self._peak = torch.tensor(peak, dtype=torch.float32, device=device)
        self._weight_decay = config.weight_decay
        # Half precision is enough for an approximate orthogonalisation, and many times faster on a GPU only.
        self._compute_dtype = torch.bfloat16 if device.type == "cuda" else None

    def update(self, multiplier: Tensor, divisor: Tensor, finite: Tensor) -> None:
        rate = self._peak * multiplier * finite
        for names, members, scales, momentum in self._batches:
            gradients = torch.stack([_wide(g) for g in _gradients(names, members)]) / divisor
            gradients = torch.where(finite > 0, gradients, 0.0)
            momentum.lerp_(gradients, ((1.0 - MUON_MOMENTUM) * finite).to(momentum.dtype))
            direction = newton_schulz(gradients.lerp(momentum, MUON_MOMENTUM).to(self._compute_dtype or momentum.dtype))
            delta = direction.to(momentum.dtype) * (scales * rate)
            if self._weight_decay:
                torch._foreach_mul_(members, 1.0 - rate * self._weight_decay)
            for parameter, change in zip(members, delta.unbind(), strict=True):
                _wide(parameter).sub_(change)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for names, members, _, momentum in self._batches:
            for name, parameter, buffer in zip(names, members, momentum.unbind(), strict=True):
                # In the parameter's own orientation, so that the file does not depend on how matrices are batched.
                yield f"{name}.momentum", buffer if _wide(parameter) is parameter else buffer.mT


class Optimizer:
    """The update rules of all parameters under one schedule and one global clip."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], rules: list[UpdateRule], table: list[float], clip_norm: float
    ) -> None:
        self._names = list(parameters)
        self._parameters: list[Tensor] = list(parameters.values())
        self._rules = rules
        device = self._parameters[0].device
        self._table = torch.tensor(table, dtype=torch.float32, device=device)
        self._clip_norm = clip_norm
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        """Global gradient norm of the latest step before clipping, on the device; not finite if it was skipped."""

    @torch.no_grad()
    def step(self, denominator: Tensor | None = None) -> None:
        """Apply the gradients in `parameter.grad`; no host synchronisation, so it can be captured in a CUDA graph.

        Args:
            denominator: scalar on the device; gradients are sums that are divided by it in the same pass. None: 1.

        A gradient that is not finite changes neither weights nor moments (`grad_norm` then tells); the schedule moves
        on. `parameter.grad` is overwritten: clear it before the next backward.

        Raises:
            OptimizerStateError: when a parameter has no gradient.
        """
        norm = torch.nn.utils.get_total_norm(_gradients(self._names, self._parameters))
        divisor = torch.ones_like(norm) if denominator is None else denominator.to(norm.dtype)
        norm = norm / divisor
        self.grad_norm.copy_(norm)
        finite = torch.isfinite(norm).to(norm.dtype)
        divisor = divisor * (norm / self._clip_norm).clamp_min(1.0)
        multiplier = self._table.index_select(0, self._step.clamp_max(len(self._table) - 1)).squeeze(0)
        for rule in self._rules:
            rule.update(multiplier, divisor, finite)
        self._step += 1

    @torch.no_grad()
    def set_multipliers(self, multipliers: list[float]) -> None:
        """Replace the schedule by these shares of the peak rate, one for each step of the run, in place."""
        self._table.copy_(torch.tensor(multipliers, dtype=torch.float32))

    def state_dict(self) -> dict[str, Tensor]:
        """The live state by name; clone it to keep it, the next step changes it in place."""
        state = {"step": self._step}
        for rule in self._rules:
            state.update(rule.state())
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into place; addresses stay, so a captured graph goes on with the loaded values.

        Raises:
            OptimizerStateError: when names or shapes differ, as they do between AdamW and Muon.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())
            raise OptimizerStateError(
                f"the saved optimizer state is of another optimizer or drafter ({len(different)} tensors differ, "
                f"the first is {different[0]}): keep `optimizer.name` and the drafter's shape, or start a new run"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise OptimizerStateError(
                    f"the saved optimizer state has {name} of shape {list(state[name].shape)}, "
                    f"this drafter needs {list(tensor.shape)}: keep the drafter's shape, or start a new run"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total_steps: int
) -> Optimizer:
    """The optimizer that `config` describes, for a run of `total_steps` steps over parameters on one device.

    Weight decay applies to matrices only; norm weights are left alone.
    """
    parameters = dict(named_parameters)
    matrices = {name: p for name, p in parameters.items() if p.ndim == 2}
    others = {name: p for name, p in parameters.items() if p.ndim != 2}
    rules: list[UpdateRule] = []
    if matrices:
        rules.append(Muon(matrices, config) if config.name == "muon" else AdamW(matrices, config, config.weight_decay))
    if others:
        rules.append(AdamW(others, config, 0.0))
    table = [schedule_multiplier(step, total_steps, config) for step in range(total_steps)]
    return Optimizer(parameters, rules, table, config.clip_norm)


def _gradients(names: list[str], parameters: list[Tensor]) -> list[Tensor]:
    gradients = []
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is None:
            raise OptimizerStateError(f"{name} has no gradient: it took no part in the loss")
        gradients.append(parameter.grad)
    return gradients


def _wide(matrix: Tensor) -> Tensor:
    """The matrix, transposed if it is taller than wide."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
