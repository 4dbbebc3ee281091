"""The update rules against torch's own and against float64, the schedules at their corners."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trainer.config.sections import OptimizerConfig
from trainer.step.optim import Optimizer, OptimizerStateError, build_optimizer, newton_schulz, schedule_multiplier

SHAPES = {"wide": (8, 24), "tall": (24, 8), "square": (16, 16), "other_wide": (8, 24), "norm": (16,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def fill_gradients(params: dict[str, nn.Parameter], generator: torch.Generator, size: float = 1.0) -> None:
    for parameter in params.values():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def run(optimizer: Optimizer, params: dict[str, nn.Parameter], steps: int, seed: int = 1, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        fill_gradients(params, generator, size)
        optimizer.step()


def values(params: dict[str, nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params.values()]


def constant(**options: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate(
        {"schedule": "constant", "warmup_ratio": 0.0, "clip_norm": 1e9, "lr": 1e-2, **options}
    )


def test_adamw_equals_torchs_to_the_last_bit() -> None:
    ours, theirs = parameters(), parameters()
    config = constant(weight_decay=0.1)
    matrices = [p for p in theirs.values() if p.ndim == 2]
    norms = [p for p in theirs.values() if p.ndim != 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=torch.tensor(config.lr),
        betas=config.betas,
        fused=True,
    )
    optimizer = build_optimizer(ours.items(), config, 10)
    generators = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(10):
        fill_gradients(ours, generators[0])
        fill_gradients(theirs, generators[1])
        optimizer.step()
        reference.step()
    for mine, other in zip(values(ours), values(theirs), strict=True):
        assert torch.equal(mine, other)


def test_adamw_with_clipping_and_a_denominator_follows_the_formula_in_float64() -> None:
    params = parameters()
    config = constant(weight_decay=0.05, clip_norm=1.5)
    optimizer = build_optimizer(params.items(), config, 20)
    exact = {name: p.detach().double().clone() for name, p in params.items()}
    first = {name: torch.zeros_like(p) for name, p in exact.items()}
    second = {name: torch.zeros_like(p) for name, p in exact.items()}
    generator = torch.Generator().manual_seed(5)
    denominator = 7.0
    for step in range(1, 21):
        fill_gradients(params, generator, size=10.0 / step)
        gradients = {name: p.grad.double() / denominator for name, p in params.items() if p.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        optimizer.step(torch.tensor(denominator))
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-6)
        for name, value in exact.items():
            gradient = gradients[name] * min(1.0, config.clip_norm / norm)
            first[name] = config.betas[0] * first[name] + (1 - config.betas[0]) * gradient
            second[name] = config.betas[1] * second[name] + (1 - config.betas[1]) * gradient**2
            if value.ndim == 2:
                value *= 1 - config.lr * config.weight_decay
            root = (second[name] / (1 - config.betas[1] ** step)).sqrt() + 1e-8
            value -= config.lr * (first[name] / (1 - config.betas[0] ** step)) / root
    for name, value in exact.items():
        torch.testing.assert_close(params[name].detach().double(), value, rtol=1e-5, atol=1e-6)


def reference_newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_follows_the_formula_in_float64() -> None:
    params = parameters()
    config = constant(name="muon", muon_lr=0.02, weight_decay=0.1)
    optimizer = build_optimizer(params.items(), config, 8)
    exact = {name: p.detach().double().clone() for name, p in params.items() if p.ndim == 2}
    momentum = {name: torch.zeros_like(p) for name, p in exact.items()}
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        fill_gradients(params, generator)
        for name, value in exact.items():
            gradient = params[name].grad
            assert gradient is not None
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient.double()
            update = 0.05 * gradient.double() + 0.95 * momentum[name]
            tall = value.shape[0] > value.shape[1]
            direction = reference_newton_schulz(update.T).T if tall else reference_newton_schulz(update)
            value *= 1 - 0.02 * 0.1
            value -= 0.02 * math.sqrt(max(1.0, value.shape[0] / value.shape[1])) * direction
        optimizer.step()
    for name, value in exact.items():
        torch.testing.assert_close(params[name].detach().double(), value, rtol=1e-4, atol=1e-5)


def test_muon_agrees_with_torchs_muon_up_to_its_half_precision() -> None:
    ours, theirs = parameters(), parameters()
    names = [name for name, p in theirs.items() if p.ndim == 2]
    reference = torch.optim.Muon([theirs[name] for name in names], lr=0.02, weight_decay=0.1)
    run(build_optimizer(ours.items(), constant(name="muon", muon_lr=0.02, weight_decay=0.1), 5), ours, 5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        fill_gradients(theirs, generator)
        reference.step()
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=5e-3)
        assert (theirs[name] - parameters()[name]).abs().max() > 2e-2  # five times the tolerance: it moved


def test_muon_updates_norms_by_adamw() -> None:
    ours, theirs = parameters(), parameters()
    run(build_optimizer(ours.items(), constant(name="muon"), 5), ours, 5)
    run(build_optimizer(theirs.items(), constant(name="adamw"), 5), theirs, 5)
    assert torch.equal(ours["norm"], theirs["norm"])
    assert not torch.equal(ours["wide"], theirs["wide"])


def test_muons_rate_is_ten_times_adamws_unless_given() -> None:
    implied, given = parameters(), parameters()
    run(build_optimizer(implied.items(), constant(name="muon", lr=1e-3), 2), implied, 2)
    run(build_optimizer(given.items(), constant(name="muon", lr=1e-3, muon_lr=1e-2), 2), given, 2)
    assert torch.equal(implied["square"], given["square"])


def test_newton_schulz_makes_every_matrix_of_a_batch_nearly_orthogonal() -> None:
    matrices = (
        torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 1e3])[:, None, None].clone()
    )
    singular = torch.linalg.svdvals(newton_schulz(matrices))
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_newton_schulz_keeps_the_singular_vectors() -> None:
    matrix = torch.randn(6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    projected = left.T @ newton_schulz(matrix[None])[0] @ right.T
    torch.testing.assert_close(projected, torch.diag(torch.diagonal(projected)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_told(name: str) -> None:
    disturbed, quiet = parameters(), parameters()
    optimizers = [build_optimizer(p.items(), constant(name=name, weight_decay=0.1), 9) for p in (disturbed, quiet)]
    run(optimizers[0], disturbed, 3)
    run(optimizers[1], quiet, 3)
    fill_gradients(disturbed, torch.Generator().manual_seed(0))
    assert disturbed["wide"].grad is not None
    disturbed["wide"].grad[0, 0] = float("nan")
    before = values(disturbed)
    optimizers[0].step()
    assert not math.isfinite(float(optimizers[0].grad_norm))
    assert all(torch.equal(a, b) for a, b in zip(values(disturbed), before, strict=True))
    run(optimizers[0], disturbed, 3, seed=9)
    run(optimizers[1], quiet, 3, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(values(disturbed), values(quiet), strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimizer_goes_on_to_the_last_bit(name: str) -> None:
    config = OptimizerConfig(name=name, weight_decay=0.1, warmup_ratio=0.2)  # type: ignore[arg-type]
    straight = parameters()
    optimizer = build_optimizer(straight.items(), config, 10)
    run(optimizer, straight, 4)
    weights = values(straight)
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    run(optimizer, straight, 6, seed=7)

    resumed = parameters(seed=42)
    for parameter, value in zip(resumed.values(), weights, strict=True):
        parameter.data.copy_(value)
    again = build_optimizer(resumed.items(), config, 10)
    addresses = [tensor.data_ptr() for tensor in again.state_dict().values()]
    again.load_state_dict(state)
    assert [tensor.data_ptr() for tensor in again.state_dict().values()] == addresses
    run(again, resumed, 6, seed=7)
    assert all(torch.equal(a, b) for a, b in zip(values(straight), values(resumed), strict=True))


def test_state_of_another_optimizer_is_refused_by_name() -> None:
    params = parameters()
    adamw = build_optimizer(params.items(), constant(), 5)
    muon = build_optimizer(params.items(), constant(name="muon"), 5)
    with pytest.raises(OptimizerStateError, match=r"optimizer\.name"):
        muon.load_state_dict(adamw.state_dict())


def test_state_of_another_shape_is_refused_and_nothing_is_loaded() -> None:
    params = parameters()
    optimizer = build_optimizer(params.items(), constant(), 5)
    run(optimizer, params, 2)
    before = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    other = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    other["tall.exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(OptimizerStateError, match=r"tall\.exp_avg"):
        optimizer.load_state_dict(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state_dict().items())


def test_a_parameter_without_a_gradient_is_named() -> None:
    params = parameters()
    fill_gradients(params, torch.Generator().manual_seed(0))
    params["square"].grad = None
    with pytest.raises(OptimizerStateError, match="square"):
        build_optimizer(params.items(), constant(), 5).step()


def test_the_rate_follows_the_schedule_during_steps() -> None:
    params = {"weight": nn.Parameter(torch.zeros(4))}
    config = OptimizerConfig(lr=1e-2, warmup_ratio=0.3, schedule="wsd", decay_ratio=0.4, clip_norm=1e9)
    optimizer = build_optimizer(params.items(), config, 10)
    for step in range(10):
        before = params["weight"].detach().clone()
        params["weight"].grad = torch.ones(4)
        optimizer.step()  # with a constant gradient, AdamW moves by the learning rate
        moved = float((before - params["weight"].detach()).mean())
        assert moved == pytest.approx(1e-2 * schedule_multiplier(step, 10, config), rel=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_rises_in_equal_parts_to_the_peak(schedule: str) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_ratio=0.1)  # type: ignore[arg-type]
    assert [schedule_multiplier(s, 50, config) for s in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("total", [1, 2, 3, 1000])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.99])
def test_every_schedule_stays_between_zero_and_the_peak(total: int, schedule: str, warmup: float) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_ratio=warmup, min_lr_ratio=0.1)  # type: ignore[arg-type]
    rates = [schedule_multiplier(step, total, config) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) > 0.98  # a run of any length gets to see (nearly) its peak rate


def test_cosine_is_at_half_height_in_the_middle_and_ends_at_the_minimum() -> None:
    config = OptimizerConfig(schedule="cosine", warmup_ratio=0.2, min_lr_ratio=0.1)
    assert schedule_multiplier(20, 100, config) == 1.0
    assert schedule_multiplier(60, 100, config) == pytest.approx(0.55)
    assert schedule_multiplier(99, 100, config) == pytest.approx(0.1, abs=1e-3)
    assert schedule_multiplier(100, 100, config) == pytest.approx(0.1)
    assert schedule_multiplier(500, 100, config) == pytest.approx(0.1)


def test_wsd_is_flat_until_its_decay_begins() -> None:
    config = OptimizerConfig(schedule="wsd", warmup_ratio=0.1, decay_ratio=0.2, min_lr_ratio=0.0)
    assert {schedule_multiplier(step, 100, config) for step in range(9, 81)} == {1.0}
    assert schedule_multiplier(81, 100, config) == pytest.approx(0.95)
    assert schedule_multiplier(99, 100, config) == pytest.approx(0.05)
    assert schedule_multiplier(100, 100, config) == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_captured_step_does_what_the_eager_one_does(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = OptimizerConfig(name=name, weight_decay=0.1, warmup_ratio=0.2)  # type: ignore[arg-type]
    eager, captured = ({n: nn.Parameter(p.detach().cuda()) for n, p in parameters().items()} for _ in range(2))
    optimizers = [build_optimizer(p.items(), config, 10) for p in (eager, captured)]
    for params in (eager, captured):
        for parameter in params.values():
            parameter.grad = torch.zeros_like(parameter)
    start = {n: t.clone() for n, t in optimizers[1].state_dict().items()}
    weights = values(captured)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizers[1].step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for parameter, value in zip(captured.values(), weights, strict=True):
        parameter.data.copy_(value)
    optimizers[1].load_state_dict(start)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        for n in eager:
            gradient = torch.randn(eager[n].shape, generator=generator).cuda()
            for params in (eager, captured):
                static = params[n].grad
                assert static is not None
                static.copy_(gradient)
        optimizers[0].step()
        graph.replay()
    for mine, other in zip(values(eager), values(captured), strict=True):
        assert torch.equal(mine, other)
