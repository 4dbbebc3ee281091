"""Targets: tapped features are those of each document alone, whatever the architecture."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from trainer.compilation.turn import Turn
from trainer.config.sections import DrafterSection, TargetConfig
from trainer.data import Documents, Row, RowShape, RowSource
from trainer.drafter.config import DrafterConfig
from trainer.drafter.for_target import config_for_target
from trainer.inputs import InputError
from trainer.pretrained import TargetError, load_model, load_model_config, load_tokenizer
from trainer.target.attention import VARLEN
from trainer.target.features import FeatureMaker
from trainer.target.inputs import TargetInputs
from trainer.target.model import Target, decoder_layer

VOCAB, HIDDEN = 97, 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for attention to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": HYBRID,
    "gemma4_text": HYBRID
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 32},
    "gpt_oss": HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 8},
    "llama4_text": {"attention_chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "cohere": {},
    "gpt2": {},
}
SCALED: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": HYBRID,
    "vaultgemma": {"sliding_window": 8},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "hyperclovax": {"embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "falcon_h1": {
        "embedding_multiplier": 5.0,
        "lm_head_multiplier": 0.25,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
    "minicpm3": {
        "scale_emb": 12,
        "dim_model_base": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "cohere": {},
    "cohere2": HYBRID,
    "afmoe": HYBRID | {"mup_enabled": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
ONE_BY_ONE = {"qwen3_5_text", "qwen3_5_moe_text", "lfm2", "llama4_text"}
TAPS = [0, 2]


def config_of(family: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**COMMON | FAMILIES[family])


def build(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def drafter_config(model: Any) -> DrafterConfig:
    """A drafter's configuration for a target, by the rules alone."""
    section = DrafterSection(num_layers=1, target_layer_ids=[0], mask_token_id=3)
    return config_for_target(section, model.config)


def drafter_logits(drafter: DrafterConfig, hidden: Tensor, head: Tensor) -> Tensor:
    logits = hidden @ head.T * drafter.output_multiplier
    cap = drafter.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


@pytest.fixture(scope="module")
def row() -> Row:
    """Five documents longer than any window of the models, and padding."""
    documents = [
        ([3 + (7 * n * n + 11 * d) % 90 for n in range(size)], [True] * size)
        for d, size in enumerate((20, 13, 11, 31, 19))
    ]
    return RowSource(Documents.from_lists(documents), sequence_length=128, anchors_per_row=16, epochs=1, seed=0).row(0)


def documents_of(row: Row) -> list[slice]:
    starts = sorted({int(start) for start in row.document_start[row.loss_mask]})
    return [slice(start, start + int((row.document_start == start).sum())) for start in starts]


def alone(model: Any, row: Row, taps: list[int]) -> dict[int, Tensor]:
    """By first token: tapped features of a run of each document by itself, through the whole model."""
    result = {}
    for document in documents_of(row):
        with torch.no_grad():
            output = model(row.input_ids[None, document], output_hidden_states=True, use_cache=False)
        result[document.start] = torch.cat([output.hidden_states[layer + 1][0] for layer in taps], dim=-1)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_a_packed_row_are_those_of_each_document_alone(family: str, row: Row) -> None:
    model = build(config_of(family))
    expected = alone(model, row, TAPS)
    assert len(expected) == 5
    target = Target(model, TAPS, "cpu")
    features = target.features(row)
    assert features.hidden.shape == (128, len(TAPS) * HIDDEN)
    assert features.last_hidden is None
    assert features.hidden.isfinite().all()
    for document in documents_of(row):
        torch.testing.assert_close(features.hidden[document], expected[document.start], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_features_of_a_target_in_half_precision_are_the_exact_ones_rounded(
    family: str, dtype: torch.dtype, row: Row
) -> None:
    expected = alone(build(config_of(family)), row, TAPS)
    features = Target(build(config_of(family)).to(dtype), TAPS, "cpu", last_hidden=True).features(row)
    assert features.last_hidden is not None
    assert features.hidden.dtype == features.last_hidden.dtype == dtype
    for document in documents_of(row):
        right = expected[document.start]
        errors = (features.hidden[document].float() - right).norm(dim=-1) / right.norm(dim=-1)
        assert float(errors.median()) < 0.05


@pytest.mark.parametrize("family", sorted(ONE_BY_ONE))
def test_a_target_that_carries_state_or_chunks_along_the_row_is_run_document_by_document(family: str) -> None:
    assert not Target(build(config_of(family)), TAPS, "cpu").packed


def test_a_target_whose_masks_ignore_positions_is_found_out(row: Row) -> None:
    """gpt-oss of transformers 5.24 reads restarting position ids but does not mask by them: documents would mix."""
    target = Target(build(config_of("gpt_oss")), TAPS, "cpu")
    if target.packed:
        pytest.skip("this transformers masks gpt-oss by position ids")
    leaking = target.forward(TargetInputs.of(row)).hidden
    right = target.features(row).hidden
    second = documents_of(row)[1]
    assert not torch.allclose(leaking[second], right[second], atol=1e-2)


def test_packed_and_unpacked_ways_agree(row: Row) -> None:
    target = Target(build(config_of("qwen3")), TAPS, "cpu", last_hidden=True)
    packed = target.features(row)
    target.attention = "unpacked"
    unpacked = target.features(row)
    assert packed.last_hidden is not None
    assert unpacked.last_hidden is not None
    for document in documents_of(row):
        torch.testing.assert_close(packed.hidden[document], unpacked.hidden[document], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.last_hidden[document], unpacked.last_hidden[document], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama4_text"])
def test_layers_behind_the_last_tap_and_the_head_are_not_run(family: str, row: Row) -> None:
    model = build(config_of(family))
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    target = Target(model, [0, 2], "cpu")
    ran.clear()
    target.features(row)
    assert {"model.layers.0", "model.layers.1", "model.layers.2"} <= set(ran)
    assert not [name for name in ran if name.startswith("model.layers.3") or name == "lm_head"]


def test_taps_come_in_the_order_asked_for_and_may_repeat(row: Row) -> None:
    model = build(config_of("llama"))
    expected = alone(model, row, [2, 0, 2])
    hidden = Target(model, [2, 0, 2], "cpu").features(row).hidden
    for document in documents_of(row):
        torch.testing.assert_close(hidden[document], expected[document.start], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "gemma2", "llama4_text"])
def test_last_hidden_gives_the_targets_own_logits(family: str, row: Row) -> None:
    model = build(config_of(family))
    logits = {}
    for document in documents_of(row):
        with torch.no_grad():
            logits[document.start] = model(row.input_ids[None, document], use_cache=False).logits[0]
    drafter = drafter_config(model)
    target = Target(model, TAPS, "cpu", last_hidden=True)
    last = target.features(row).last_hidden
    assert last is not None
    for document in documents_of(row):
        mine = drafter_logits(drafter, last[document], target.head)
        torch.testing.assert_close(mine, logits[document.start], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SCALED)
def test_a_drafters_scaling_is_what_its_target_does_to_embeddings_and_logits(family: str) -> None:
    """Measured on the target as it runs, for families write down the same thing under many names."""
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    model = build(CONFIG_MAPPING[family](**COMMON | SCALED[family]))
    drafter = drafter_config(model)
    ids = torch.arange(3, 20)
    entered: list[Tensor] = []
    first = model.get_decoder().layers[0]
    first.register_forward_pre_hook(
        lambda _module, arguments, keywords: entered.append(arguments[0] if arguments else keywords["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        last = model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
        logits = model(ids[None], use_cache=False).logits[0]
    embedded = model.get_input_embeddings().weight[ids] * drafter.input_embedding_scale
    torch.testing.assert_close(entered[0][0], embedded, rtol=1e-2, atol=1e-5)
    mine = drafter_logits(drafter, last, model.get_output_embeddings().weight)
    torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-5)
    assert (drafter.input_embedding_scale, drafter.output_multiplier, drafter.final_logit_softcapping) != (1, 1, None)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_one_tensor_exactly_when_the_target_ties_them(tied: bool) -> None:
    model = build(CONFIG_MAPPING["llama"](**COMMON, tie_word_embeddings=tied))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    target = Target(model, TAPS, "cpu")
    assert (target.head is target.embedding) == tied
    assert torch.equal(target.embedding, embedding)
    assert torch.equal(target.head, head)
    assert target.embedding.shape == target.head.shape == (VOCAB, HIDDEN)
    assert not target.embedding.requires_grad
    assert not target.head.requires_grad


def test_a_multimodal_wrapper_is_read_through_its_text_model(row: Row) -> None:
    text = config_of("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    model = build(config)
    expected = alone(model, row, TAPS)
    target = Target(model, TAPS, "cpu")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, HIDDEN, VOCAB)
    hidden = target.features(row).hidden
    for document in documents_of(row):
        torch.testing.assert_close(hidden[document], expected[document.start], rtol=1e-4, atol=1e-4)


def test_features_carry_no_gradient_and_are_no_inference_tensors(row: Row) -> None:
    hidden = Target(build(config_of("llama")), TAPS, "cpu").features(row).hidden
    assert not hidden.requires_grad
    assert not hidden.is_inference()


def test_targets_do_not_disturb_each_other_in_threads(row: Row) -> None:
    from concurrent.futures import ThreadPoolExecutor

    targets = [Target(build(config_of("qwen3")), TAPS, "cpu") for _ in range(3)]
    expected = targets[0].features(row).hidden
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            for features in pool.map(lambda target: target.features(row), targets):
                torch.testing.assert_close(features.hidden, expected)


def test_boundaries_hold_documents_then_padding_in_pieces_no_longer_than_a_document(row: Row) -> None:
    starts = [document.start for document in documents_of(row)]
    exact = TargetInputs.of(row)
    assert exact.boundaries.tolist() == [*starts, 94, 125, 128]
    assert exact.longest == 31
    fixed = TargetInputs.of(row, RowShape(tokens=128, anchors=16, documents=7, longest=40))
    assert fixed.boundaries.tolist() == [*starts, 94] + [128] * (7 + 4 + 1 - 6)
    assert fixed.boundaries.dtype == torch.int32
    trial = TargetInputs.trial(RowShape(tokens=128, anchors=16, documents=7, longest=40), VOCAB, torch.device("cpu"))
    assert trial.boundaries.tolist() == [0, 40, 80, 120] + [128] * 8
    assert trial.position_ids[0, [0, 39, 40, 119, 127]].tolist() == [0, 39, 0, 39, 7]
    trial.copy_(fixed)
    assert torch.equal(trial.input_ids, row.input_ids[None])
    assert torch.equal(trial.boundaries, fixed.boundaries)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ONE_BY_ONE - {"gpt_oss"}))
def test_layers_of_one_kind_compile_to_one_graph_and_compute_the_same(family: str, row: Row) -> None:
    torch.compiler.reset()
    target = Target(build(config_of(family)), TAPS, "cpu")
    assert target.packed
    assert target.has_plain_layers
    expected = target.features(row).hidden
    graphs = CompileCounter()
    target.run_layers_by(torch.compile(decoder_layer, fullgraph=True, dynamic=False, backend=graphs))
    assert torch.equal(target.features(row).hidden, expected)
    # Gemma 4 has a width of its own for full attention and hands its first keys to later layers.
    assert graphs.frame_count == (1 if family != "gemma4_text" else 3)
    target.run_layers_by(None)
    before = graphs.op_count
    assert torch.equal(target.features(row).hidden, expected)
    assert graphs.op_count == before


def graph_turn(backend: str) -> Turn:
    """A turn of graph mode on a CPU: what it captures is called instead of replayed."""
    turn = Turn("target 0", torch.device("cpu"), None, "compiled")
    turn.mode = "graph"
    turn.compile = partial(turn.compile, backend=backend)  # type: ignore[method-assign]
    turn.capture = lambda name, function: function  # type: ignore[method-assign]
    return turn


@pytest.fixture
def rows() -> RowSource:
    documents = [([3 + (7 * n * n + d) % 90 for n in range(30 + d)], [True] * (30 + d)) for d in range(12)]
    return RowSource(Documents.from_lists(documents), sequence_length=128, anchors_per_row=16, epochs=1, seed=0)


def test_a_captured_target_runs_compiled_layers(rows: RowSource) -> None:
    torch.compiler.reset()
    target = Target(build(config_of("qwen3")), TAPS, "cpu")
    target.uncapturable = ""
    expected = [target.features(rows.row(number)).hidden for number in range(3)]
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("aot_eager")
    maker.prepare(turn)
    report = turn.report()
    assert (report.mode, report.compiled, report.graphs, report.recompiles, report.note) == ("graph", True, 1, 0, "")
    for number, right in enumerate(expected):
        torch.testing.assert_close(maker.make(rows.row(number)).hidden, right)


class Unsupported(Exception):
    pass


def refuse(*_: Any) -> Any:
    raise Unsupported("no such kernel\nmore")


def spoil(graph: torch.fx.GraphModule, _: Any) -> Any:
    return lambda *inputs: [output * float("nan") for output in graph(*inputs)]


def other(graph: torch.fx.GraphModule, _: Any) -> Any:
    return lambda *inputs: [output * 1.1 for output in graph(*inputs)]


@pytest.mark.parametrize(
    ("backend", "fault"),
    [(refuse, "no such kernel"), (spoil, "compiled, one differs by nan%"), (other, "compiled, one differs by 10.0%")],
)
def test_layers_that_do_not_compile_or_compute_something_else_run_as_they_are(
    backend: Any, fault: str, rows: RowSource
) -> None:
    torch.compiler.reset()
    target = Target(build(config_of("qwen3")), TAPS, "cpu")
    target.uncapturable = ""
    expected = target.features(rows.row(0)).hidden
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn(backend)
    maker.prepare(turn)
    report = turn.report()
    assert (report.mode, report.compiled) == ("graph", False)
    assert fault in report.note
    assert "\n" not in report.note
    torch.testing.assert_close(maker.make(rows.row(0)).hidden, expected)


def test_layers_that_hand_keys_on_are_compiled_for_what_they_get_in_a_run(rows: RowSource) -> None:
    torch.compiler.reset()
    config = CONFIG_MAPPING["gemma4_text"](**COMMON | FAMILIES["gemma4_text"] | {"num_kv_shared_layers": 2})
    target = Target(build(config), [0, 3], "cpu")
    target.uncapturable = ""
    expected = target.features(rows.row(0)).hidden
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("aot_eager")
    maker.prepare(turn)
    report = turn.report()
    assert report.compiled, report
    torch.testing.assert_close(maker.make(rows.row(0)).hidden, expected)
    assert turn.report().graphs == report.graphs


def test_too_many_kinds_of_layers_run_uncompiled(rows: RowSource) -> None:
    torch.compiler.reset()
    target = Target(build(config_of("gemma4_text")), TAPS, "cpu")
    target.uncapturable = ""
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        maker.prepare(turn)
    assert turn.report().note.startswith("its layers run uncompiled: they are of more than 1 kinds (")


def test_layers_that_another_library_has_wrapped_are_left_alone(rows: RowSource) -> None:
    model = build(config_of("qwen3"))
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2.0
    target = Target(model, TAPS, "cpu")
    target.uncapturable = ""
    expected = target.features(rows.row(0)).hidden
    maker = FeatureMaker(target, rows.shape)
    turn = graph_turn("aot_eager")
    maker.prepare(turn)
    assert "another library has wrapped them" in turn.report().note
    torch.testing.assert_close(maker.make(rows.row(0)).hidden, expected)


@pytest.mark.parametrize(("family", "told"), [("qwen3_5_text", True), ("lfm2", True), ("qwen3", False)])
def test_layers_that_carry_state_are_told_which_document_a_token_belongs_to(
    family: str, told: bool, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(build(config_of(family)), TAPS, "cpu")
    given: dict[str, Any] = {}

    def decoder(**arguments: Any) -> Any:
        given.update(arguments)
        raise TargetError("seen")

    monkeypatch.setattr(target._decoder.config, "_attn_implementation", VARLEN)
    monkeypatch.setattr(target._decoder, "forward", decoder)
    inputs = TargetInputs.of(row, RowShape(tokens=128, anchors=16, documents=7, longest=40))
    with pytest.raises(TargetError, match="seen"):
        target.forward(inputs)
    assert ("seq_idx" in given) == told
    numbers = inputs.numbers()
    assert numbers.shape == (1, 128)
    assert numbers.dtype == torch.int32
    for number, document in enumerate(documents_of(row)):
        assert set(numbers[0, document].tolist()) == {number}
    assert numbers[0, 94:].min() == 5


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, scale: float, window_size: Any, **__: Any
) -> Tensor:
    """What torch's variable-length kernel computes, for a CPU: [S, heads, d]."""
    result = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        places = torch.arange(end - start)
        ahead = places[None] - places[:, None]
        visible = (ahead <= 0) & (ahead >= -window_size[0] if window_size[0] >= 0 else torch.tensor(True))
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        scores = (q @ k.repeat_interleave(group, 0).mT) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        result[start:end] = (weights @ v.repeat_interleave(group, 0)).transpose(0, 1)
    return result


@pytest.mark.parametrize(
    ("family", "changes", "taken"),
    [
        ("llama", {}, True),
        ("mistral", {"sliding_window": 8}, True),
        ("gemma3_text", HYBRID, True),
        # Its window stands in the mask alone, which the kernel does not see.
        ("phimoe", {"sliding_window": 8, "num_local_experts": 4}, False),
        ("phimoe", {"sliding_window": 4096, "num_local_experts": 4}, False),
    ],
)
def test_the_kernel_is_taken_only_by_targets_that_tell_it_all(
    family: str, changes: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.target.attention.varlen_attn", plain_varlen)
    target = Target(build(CONFIG_MAPPING[family](**COMMON | changes)), TAPS, "cpu")
    own = target._decoder.config._attn_implementation
    target._decoder.set_attn_implementation(VARLEN)
    assert (target.trial().keeps_apart("varlen", reference=own) is None) == taken
    assert target._decoder.config._attn_implementation == VARLEN


def test_positions_that_count_from_the_start_of_a_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build(config_of("llama")), TAPS, "cpu")
    monkeypatch.setattr("trainer.target.attention.varlen_attn", plain_varlen)
    own = target._decoder.config._attn_implementation
    target._decoder.set_attn_implementation(VARLEN)
    rotary = target._decoder.rotary_emb.forward
    monkeypatch.setattr(
        target._decoder.rotary_emb, "forward", lambda x, position_ids: rotary(x, torch.arange(x.shape[1])[None] ** 2)
    )
    assert target.trial().keeps_apart("varlen", reference=own) is not None


@pytest.mark.parametrize("changes", [{"index_topk": 2048}, {"layer_types": ["compressed_sparse_attention"] * 4}])
def test_attention_that_selects_among_tokens_reads_one_document_at_a_time(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("llama")
    for name, value in changes.items():
        monkeypatch.setattr(config, name, value, raising=False)
    model = build(config)
    for name, value in changes.items():
        setattr(model.config, name, value)
    assert Target(model, TAPS, "cpu").attention == "unpacked"


def test_layers_that_return_something_else_are_refused_at_once() -> None:
    model = build(config_of("llama"))
    own = model.model.layers[2].forward
    model.model.layers[2].forward = lambda *args, **kwargs: own(*args, **kwargs).unsqueeze(0)
    with pytest.raises(TargetError, match="models of its kind can't be targets"):
        Target(model, [2], "cpu")


def test_layers_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(TargetError, match=r"\[1, 4\] must name layers between 0 and 3"):
        Target(build(config_of("llama")), [1, 4], "cpu")


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"target.path: {tmp_path} holds no model, for it has no config.json"):
        load_model(TargetConfig(path=str(tmp_path)), "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "nobody-s"}')
    for load in (load_model_config, load_tokenizer, lambda config: load_model(config, "cpu")):
        with pytest.raises(TargetError, match=f"target {tmp_path} cannot be loaded: ") as caught:
            load(TargetConfig(path=str(tmp_path)))
        assert "\n" not in str(caught.value)


def test_a_saved_target_is_loaded_in_the_precision_of_the_config(tmp_path: Path, row: Row) -> None:
    model = build(config_of("qwen3"))
    model.save_pretrained(tmp_path)
    expected = Target(model, TAPS, "cpu").features(row).hidden
    target = Target.load(TargetConfig(path=str(tmp_path), dtype="float32"), TAPS, "cpu")
    torch.testing.assert_close(target.features(row).hidden, expected)
    assert (
        Target.load(TargetConfig(path=str(tmp_path), dtype="bfloat16"), TAPS, "cpu").embedding.dtype == torch.bfloat16
    )
