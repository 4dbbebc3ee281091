"""The paths that exist on CUDA only, against the dense and exact ones: flex attention, half-precision head, capture."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config.sections import ObjectiveConfig
from trainer.drafter.attention import build_masks
from trainer.drafter.blocks import Blocks, make_blocks
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import DFlashDrafter
from trainer.step.objective import chunk_gradient, slot_order, slot_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HYBRID = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 70}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "whole tiles": (512, 32, {}),
    "whole tiles, hybrid": (512, 32, HYBRID),
    "ragged rows": (500, 30, {"block_size": 10}),
    "ragged rows, hybrid": (333, 21, HYBRID | {"block_size": 7}),
    "three query heads to a key head": (384, 24, {"num_attention_heads": 9, "num_key_value_heads": 3}),
    "bidirectional window": (512, 32, HYBRID | {"is_causal": False}),
}


def config_of(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3),
        "block_size": 16,
        "mask_token_id": 999,
        "layer_types": ("full_attention",) * 2,
    }
    return DrafterConfig(**fields | changes)


def blocks_of(config: DrafterConfig, length: int, count: int) -> tuple[Blocks, Tensor]:
    """Three documents, anchors all over them, two of them padded."""
    edges = [0, length // 5, length // 2, length]
    start = torch.cat([torch.full((b - a,), a) for a, b in itertools.pairwise(edges)]).cuda()
    positions = torch.arange(length, device="cuda") - start
    anchors = torch.linspace(0, length - 1, count, device="cuda").long()
    valid = torch.arange(count, device="cuda") < count - 2
    anchors[-2:] = length - 1
    blocks = make_blocks(
        torch.arange(length, device="cuda") % 900,
        positions,
        start,
        torch.ones(length, dtype=torch.bool, device="cuda"),
        anchors,
        valid,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    return blocks, positions


@pytest.mark.parametrize(("length", "count", "changes"), CASES.values(), ids=CASES.keys())
def test_compiled_flex_forward_and_backward_equal_the_dense_path(
    length: int, count: int, changes: dict[str, Any]
) -> None:
    torch.compiler.reset()
    config = config_of(**changes)
    drafter = DFlashDrafter(config).cuda()
    blocks, positions = blocks_of(config, length, count)
    generator = torch.Generator("cuda").manual_seed(1)
    queries = count * config.block_size
    embeds = torch.randn(queries, 128, generator=generator, device="cuda")
    features = torch.randn(length, 256, generator=generator, device="cuda")
    direction = torch.randn(queries, 128, generator=generator, device="cuda")

    def body(flex: bool) -> Tensor:
        masks = build_masks(config, blocks, length, flex=flex)
        return drafter(embeds, features, positions, blocks.positions, masks)

    results = []
    for flex, run in ((False, body), (True, torch.compile(body, fullgraph=True, dynamic=False))):
        drafter.zero_grad()
        hidden = run(flex)
        hidden.backward(direction)
        results.append([hidden.detach(), *(p.grad.clone() for p in drafter.parameters() if p.grad is not None)])
    for dense, flex in zip(*results, strict=True):
        assert (flex - dense).abs().max() <= 2e-3 * dense.abs().max()


@pytest.mark.parametrize("distillation", ["none", "forward_kl", "tv"])
def test_compiled_bfloat16_head_chunk_is_close_to_float64(distillation: Any) -> None:
    torch.compiler.reset()
    config = ObjectiveConfig(distillation=distillation)
    generator = torch.Generator("cuda").manual_seed(2)
    hidden, teacher = (
        torch.randn(256, 512, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    head = torch.randn(5000, 512, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.1
    labels = torch.randint(0, 5000, (256,), generator=generator, device="cuda")

    def run(hidden: Tensor, head: Tensor, teacher: Tensor) -> Any:
        return chunk_gradient(hidden, head, labels, softcap=20.0, teacher_hidden=teacher, config=config)

    ours = torch.compile(run, fullgraph=True, dynamic=False)(hidden, head, teacher)
    exact = hidden.double().requires_grad_()
    logits, theirs = (torch.tanh(x @ head.double().T / 20.0) * 20.0 for x in (exact, teacher.double()))
    log_ours, log_theirs = logits.log_softmax(-1), theirs.log_softmax(-1)
    nll = -log_ours.gather(1, labels[:, None])[:, 0]
    divergence = {
        "none": nll,
        "forward_kl": (log_theirs.exp() * (log_theirs - log_ours)).sum(-1),
        "tv": 0.5 * (log_theirs.exp() - log_ours.exp()).abs().sum(-1),
    }[distillation]
    loss = 0.5 * nll + 0.5 * divergence
    (gradient,) = torch.autograd.grad(loss.sum(), exact)
    torch.testing.assert_close(ours.nll.double(), nll.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.loss.double(), loss.detach(), rtol=1e-4, atol=1e-4)
    assert (ours.gradient.double() - gradient).norm() <= 0.01 * gradient.norm()


def test_a_chunk_keeps_no_more_than_a_few_copies_of_its_own_logits() -> None:
    torch.compiler.reset()
    vocabulary, chunk = 50_000, 512
    head = torch.randn(vocabulary, 256, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(chunk, 256, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(chunk, dtype=torch.long, device="cuda")
    run = torch.compile(chunk_gradient, fullgraph=True, dynamic=False)
    run(hidden, head, labels)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(hidden, head, labels)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2.2 * chunk * vocabulary * 4  # float32 logits and their half-precision gradient


def test_masks_slots_and_weights_replay_from_a_graph_for_other_anchors() -> None:
    torch.compiler.reset()
    config = config_of(**HYBRID)
    drafter = DFlashDrafter(config).cuda().requires_grad_(False)
    first, positions = blocks_of(config, 512, 32)
    second, _ = blocks_of(config, 512, 32)
    moved = second._replace(anchors=(second.anchors - 3).clamp(min=0), starts=(second.starts - 3).clamp(min=0))
    embeds = torch.randn(512, 128, device="cuda")
    features = torch.randn(512, 256, device="cuda")
    buffers = Blocks(*(tensor.clone() for tensor in first))
    objective = ObjectiveConfig(weighting="dpace")

    def body() -> tuple[Tensor, Tensor, Tensor]:
        masks = build_masks(config, buffers, 512, flex=True)
        hidden = drafter(embeds, features, positions, buffers.positions, masks)
        order = slot_order(buffers.label_mask, 64)
        nll = hidden.view(32, 16, -1)[:, 1:].square().mean(-1)
        return hidden, order.queries, slot_weights(nll, buffers.label_mask, objective)

    step = torch.compile(body, fullgraph=True, dynamic=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for blocks in (first, moved):
        for buffer, tensor in zip(buffers, blocks, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        dense = drafter(embeds, features, positions, blocks.positions, build_masks(config, blocks, 512, flex=False))
        assert (captured[0] - dense).abs().max() <= 2e-3 * dense.abs().max()
        assert torch.equal(captured[1], slot_order(blocks.label_mask, 64).queries)
