"""The drafter against the official package: same weights, same numbers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from trainer.drafter.attention import build_masks
from trainer.drafter.blocks import Blocks, make_blocks
from trainer.drafter.config import DrafterConfig
from trainer.drafter.drafting import Drafting
from trainer.drafter.model import DFlashDrafter, embed_blocks, fresh_weights

WINDOW = 6
BLOCK = 5
VOCAB = 90


def tiny(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3, 5),
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "layer_types": ("full_attention",) * 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
    }
    return DrafterConfig(**fields | changes)


HYBRID = {"layer_types": ("sliding_attention", "sliding_attention", "full_attention"), "sliding_window": WINDOW}
CONFIGS = {
    "all layers full": {},
    "hybrid, sliding layers causal in the block": HYBRID,
    "all sliding, explicitly not causal": {
        "layer_types": ("sliding_attention",) * 3,
        "sliding_window": WINDOW,
        "is_causal": False,
    },
    "all full, explicitly causal": {"is_causal": True},
    "attention bias": {"attention_bias": True},
    "scaled embedding": {"input_embedding_scale": 8.0},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
}
PARAMETERS = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())


def pair(official: ModuleType, config: DrafterConfig) -> tuple[DFlashDrafter, Any]:
    """Our drafter and the official one, with the same weights; norms are moved off 1 so that they matter."""
    ours = DFlashDrafter(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(4.0)
    theirs = official.DFlashDraftModel(Qwen3Config(**config.to_json("float32"))).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


def packed_row(config: DrafterConfig) -> tuple[Blocks, Tensor, Tensor, Tensor]:
    """Two documents, four anchors and a padded one: blocks, positions, features, embedding."""
    generator = torch.Generator().manual_seed(3)
    start = torch.tensor([0] * 17 + [17] * 23)
    positions = torch.arange(40) - start
    blocks = make_blocks(
        torch.randint(0, VOCAB - 1, (40,), generator=generator),
        positions,
        start,
        torch.ones(40, dtype=torch.bool),
        torch.tensor([1, 11, 19, 33, 39]),
        torch.tensor([True, True, True, True, False]),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(40, width, generator=generator)
    return blocks, positions, features, torch.randn(VOCAB, config.hidden_size, generator=generator)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@PARAMETERS
@torch.no_grad()
def test_every_block_of_a_packed_row_equals_the_official_drafter_on_that_block_alone(
    official: ModuleType, changes: dict[str, Any]
) -> None:
    config = tiny(**changes)
    ours, theirs = pair(official, config)
    blocks, positions, features, embedding = packed_row(config)
    embeds = embed_blocks(blocks.tokens, embedding, config.input_embedding_scale)
    masks = build_masks(config, blocks, 40, flex=False)
    hidden = ours(embeds, features, positions, blocks.positions, masks).view(5, BLOCK, -1)
    target = torch.nn.Module()
    target.get_input_embeddings = lambda: torch.nn.Embedding.from_pretrained(embedding)  # type: ignore[assignment]
    for block in torch.nonzero(blocks.valid).flatten().tolist():
        start, anchor = int(blocks.starts[block]), int(blocks.anchors[block])
        expected = theirs(
            target_hidden=features[None, start:anchor],
            noise_embedding=official._raw_input_embeddings(
                target, blocks.tokens[block][None], config.input_embedding_scale
            ),
            position_ids=torch.arange(anchor - start + BLOCK)[None],
        )
        assert_equal(hidden[block], expected[0])


@PARAMETERS
@torch.no_grad()
def test_drafting_from_cached_context_equals_the_official_cached_generation(
    official: ModuleType, changes: dict[str, Any]
) -> None:
    config = tiny(**changes)
    ours, theirs = pair(official, config)
    generator = torch.Generator().manual_seed(4)
    width = len(config.target_layer_ids) * config.hidden_size
    their_cache = DynamicCache(config=theirs.config)
    their_cache.activate_past_recording()
    drafting = Drafting(ours)
    start = 0
    for accepted in (9, 1, 4, 2):  # a prompt longer than the window, then what three rounds accepted
        features = torch.randn(accepted, width, generator=generator)
        embeds = torch.randn(BLOCK, config.hidden_size, generator=generator)
        positions = torch.arange(start, start + accepted + BLOCK)
        start += accepted
        expected = theirs(
            target_hidden=features[None],
            noise_embedding=embeds[None],
            position_ids=positions[None],
            past_key_values=their_cache,
            use_cache=True,
        )
        official._crop_to(their_cache, start)
        drafting.extend(features)
        assert_equal(drafting.denoise(embeds), expected[0])


def test_weights_have_exactly_the_official_names_and_shapes(official: ModuleType) -> None:
    config = tiny()
    theirs = official.DFlashDraftModel(Qwen3Config(**config.to_json("float32")))
    ours = {name: tensor.shape for name, tensor in DFlashDrafter(config).state_dict().items()}
    assert ours == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert len(ours) == 11 * config.num_hidden_layers + 3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@PARAMETERS
@torch.no_grad()
def test_flex_path_gives_what_the_dense_path_gives(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    drafter = DFlashDrafter(config)
    blocks, positions, features, embedding = packed_row(config)
    embeds = embed_blocks(blocks.tokens, embedding, 1.0)
    dense, flex = (
        drafter(embeds, features, positions, blocks.positions, build_masks(config, blocks, 40, flex=flex))
        for flex in (False, True)
    )
    assert_equal(flex, dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("flex", [False, True], ids=["dense", "flex"])
def test_masks_and_forward_trace_into_one_graph(flex: bool) -> None:
    config = tiny(**HYBRID)
    drafter = DFlashDrafter(config)
    blocks, positions, features, embedding = packed_row(config)

    def body(embedding: Tensor, features: Tensor, positions: Tensor, blocks: Blocks) -> Tensor:
        embeds = embed_blocks(blocks.tokens, embedding, 1.0)
        return drafter(embeds, features, positions, blocks.positions, build_masks(config, blocks, 40, flex=flex))

    with torch.no_grad():
        compiled = torch.compile(body, backend="eager", fullgraph=True, dynamic=False)
        assert_equal(compiled(embedding, features, positions, blocks), body(embedding, features, positions, blocks))


def test_initial_weights_depend_on_the_seed_alone_and_leave_the_global_generator_untouched() -> None:
    config = tiny()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = DFlashDrafter(config, seed=1), DFlashDrafter(config, seed=1), DFlashDrafter(config, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert float(first.fc.weight.detach().std()) == pytest.approx(config.initializer_range, rel=0.05)


def test_a_cast_of_the_model_does_not_round_rope_frequencies() -> None:
    drafter = DFlashDrafter(tiny())
    exact = drafter.rotary.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.rotary.inv_freq, exact)


def test_fresh_weights_give_first_logits_of_unit_spread_however_long_the_heads_rows_are() -> None:
    config = tiny()
    state = torch.randn(64, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for length in (0.1, 1.0, 20.0):
        head = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(1))
        head = head / head.norm(dim=1, keepdim=True) * length
        norm = DFlashDrafter(config, seed=None).norm
        norm.weight.data = fresh_weights(config, head, seed=0)["norm.weight"]
        assert (norm(state) @ head.T).std().item() == pytest.approx(min(length, 1.0), rel=0.05)
