"""Exports: other people's programs load them and compute what we compute."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from tests.trainer.conftest import JUDGE
from tests.trainer.engine_rules import ENGINES, RELEASED_TENSORS, Understood
from tests.trainer.tiny_models import VOCAB, drafter_for, save_target, tiny_target
from trainer.arguments import read
from trainer.commands.export import ExportError, export, main
from trainer.config.sections import CheckpointConfig, RunConfig
from trainer.drafter.drafting import Drafting
from trainer.drafter.model import DFlashDrafter
from trainer.drafter.released import fingerprint
from trainer.run import checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {"num_layers": 3, "sliding_window": 5},
    "all sliding": {"sliding_window": 5, "full_attention_layers": []},
}


def trained(folder: Path, drafter: DFlashDrafter, target: str = "org/target") -> Path:
    """A run directory with one checkpoint of this drafter."""
    config = RunConfig.model_validate(
        {
            "target": {"path": target, "dtype": "float32"},
            "data": {"sources": ["/home/someone/secret-place/answers.jsonl"], "epochs": 2},
        }
    )
    checkpoint.save(
        folder / "checkpoints",
        42,
        model=drafter.state_dict(),
        optimizer={"step": torch.zeros(1)},
        drafter_config=drafter.config.to_json("float32"),
        run={"config": config.model_dump(mode="json"), "content_hash": "ab12cd34"},
        metrics={"accept_length": 3.25},
        keep=CheckpointConfig(),
    )
    return folder


def evaluation(folder: Path, path: Path) -> Path:
    document = {
        "drafter": str(folder),
        "weights_sha256": fingerprint(folder),
        "target": "org/target",
        "dtype": "bfloat16",
        "device": "cpu",
        "block_size": 6,
        "max_new_tokens": 128,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        "sets": [
            {
                "name": "human-eval",
                "answers": 164,
                "acceptance_length": 4.567,
                "passes_saved": 0.78,
                "identical": 164,
                "tokens": 9000,
                "speedup": 2.5,
            },
        ],
    }
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("section", SHAPES.values(), ids=SHAPES.keys())
@torch.no_grad()
def test_the_official_package_computes_our_logits_from_the_export(
    official: ModuleType, tmp_path: Path, section: dict[str, Any]
) -> None:
    target = tiny_target("gemma2")  # scaled embeddings and a soft-cap
    drafter = drafter_for(target, **section)
    out = export(trained(tmp_path / "run", drafter), tmp_path / "out", dtype="float32")
    theirs = official.DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()

    generator = torch.Generator().manual_seed(1)
    features = torch.randn(9, 2 * drafter.config.hidden_size, generator=generator)
    tokens = torch.tensor([[7] + [theirs.mask_token_id] * (theirs.block_size - 1)])
    scale = float(official._draft_value(theirs.config, "input_embedding_scale", 1.0))
    embeds = official._raw_input_embeddings(target, tokens, scale)
    hidden = theirs(
        target_hidden=features[None], noise_embedding=embeds, position_ids=torch.arange(9 + theirs.block_size)[None]
    )
    expected = theirs.compute_logits(hidden, official._output_head(target))[0]

    drafting = Drafting(drafter)
    drafting.extend(features)
    config = drafter.config
    table = target.get_input_embeddings().weight
    ours = drafting.denoise(torch.nn.functional.embedding(tokens[0], table) * config.input_embedding_scale)
    ours = ours @ target.get_output_embeddings().weight.T * config.output_multiplier
    assert config.final_logit_softcapping is not None
    ours = torch.tanh(ours / config.final_logit_softcapping) * config.final_logit_softcapping
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("section", SHAPES.values(), ids=SHAPES.keys())
def test_every_engine_reads_the_same_drafter_out_of_the_files(tmp_path: Path, section: dict[str, Any]) -> None:
    drafter = drafter_for(tiny_target("llama"), **section)
    out = export(trained(tmp_path / "run", drafter), tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    config = drafter.config
    kinds = [config.attention_kind(layer_type) for layer_type in config.layer_types]
    expected = Understood(
        config.block_size,
        config.mask_token_id,
        config.target_layer_ids,
        tuple(kind.window for kind in kinds),
        tuple(kind.causal for kind in kinds),
        config.rope_parameters["rope_theta"],
    )
    assert {name: read(written) for name, read in ENGINES.items()} == dict.fromkeys(ENGINES, expected)
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert all(RELEASED_TENSORS.fullmatch(name) for name in weights.keys())  # noqa: SIM118
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "whoever reads one of them reads all"


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """speculators' converter. What the package imports for its server and its data sets is not needed and not here."""

    class Absent(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    names = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "hs_connectors")
    for name in names:
        module = Absent(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    loguru: Any = ModuleType("loguru")
    loguru.logger = type("Logger", (logging.Logger,), {"success": logging.Logger.info})("speculators")
    monkeypatch.setitem(sys.modules, "loguru", loguru)
    monkeypatch.syspath_prepend(str(JUDGE))
    yield importlib.import_module("speculators.convert.dflash.converter").DFlashConverter()
    for name in [name for name in sys.modules if name.split(".")[0] == "speculators"]:
        del sys.modules[name]


def test_speculators_converts_the_export(converter: Any, tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    drafter = drafter_for(target, sliding_window=5)
    base = save_target(target, tmp_path / "target")
    out = export(trained(tmp_path / "run", drafter), tmp_path / "out", dtype="float32")
    converter.convert(out, tmp_path / "converted", str(base))
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in drafter.config.target_layer_ids]
    assert (config["block_size"], config["mask_token_id"]) == (6, VOCAB - 1)
    assert config["transformer_layer_config"]["layer_types"] == list(drafter.config.layer_types)
    assert config["sample_from_anchor"] is False
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(weights[name], tensor)


def test_the_card_holds_recipe_data_hash_and_measured_acceptance_and_no_local_path(tmp_path: Path) -> None:
    drafter = drafter_for(tiny_target("llama"))
    run = trained(tmp_path / "run", drafter)
    folder = run / "checkpoints" / "step-00000042"
    measured = evaluation(folder, tmp_path / "evaluation.json")
    words = [str(run), str(tmp_path / "my-drafter"), "--evaluation", str(measured)]
    assert main(read(["export", *words])) == 0
    card = (tmp_path / "my-drafter" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/target"
    measured = "| human-eval | 4.57 | 78 % | 164 | 164/164 |"
    speedup = "Speedup in transformers on cpu: 2.50x for human-eval (9000 tokens); it depends on machine and load."
    for part in ("# my-drafter", "ab12cd34", "answers.jsonl", measured, speedup, "42"):
        assert part in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["optimizer"]["lr"] == 6e-4
    assert recipe["data"]["epochs"] == 2
    assert "secret-place" not in card
    assert '"num_speculative_tokens": 5' in card


def test_without_an_evaluation_the_card_says_that_decoding_was_not_measured(tmp_path: Path) -> None:
    drafter = drafter_for(tiny_target("llama"))
    out = export(trained(tmp_path / "run", drafter, target=str(tmp_path)), tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "3.25 tokens. Real decoding was not measured" in card
    assert "base_model" not in card
    assert str(tmp_path) not in card
    again = export(out, tmp_path / "again")
    assert "Not recorded" in (again / "README.md").read_text()


def test_an_evaluation_of_another_drafter_or_another_file_is_refused(tmp_path: Path) -> None:
    target = tiny_target("llama")
    run = trained(tmp_path / "run", drafter_for(target))
    other = trained(tmp_path / "other", drafter_for(target, num_layers=1))
    wrong = evaluation(other / "checkpoints" / "step-00000042", tmp_path / "wrong.json")
    with pytest.raises(ExportError, match="measured another drafter"):
        export(run, tmp_path / "out", evaluation=wrong)
    wrong.write_text("[]")
    with pytest.raises(ExportError, match="not what this trainer's `evaluate --output` writes: evaluate again"):
        export(run, tmp_path / "out", evaluation=wrong)
    with pytest.raises(ExportError, match="cannot be read"):
        export(run, tmp_path / "out", evaluation=tmp_path / "none.json")
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_the_checkpoint_holds_for_its_bfloat16_export_too(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", drafter_for(tiny_target("llama")))
    out = export(run, tmp_path / "out")
    measured = evaluation(run / "checkpoints" / "step-00000042", tmp_path / "evaluation.json")
    assert "human-eval" in (export(out, tmp_path / "again", evaluation=measured) / "README.md").read_text()


def test_a_folder_that_holds_something_is_never_overwritten_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", drafter_for(tiny_target("llama")))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(ExportError, match="not empty"):
        export(run, tmp_path / "out")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        export(run, blocked / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "run"]
    (tmp_path / "out" / "precious").unlink()
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("value", "dtype", "why"),
    [
        (1e5, "float16", r"holds 1e\+05, which float16 cannot hold: export with --dtype bfloat16"),
        (float("nan"), "float32", r"of .*step-00000042 holds numbers that are not finite"),
    ],
)
def test_weights_that_the_files_could_not_hold_are_refused_by_name(
    value: float, dtype: str, why: str, tmp_path: Path
) -> None:
    drafter = drafter_for(tiny_target("qwen3"))
    with torch.no_grad():
        drafter.fc.weight[0, 0] = value
    run = trained(tmp_path / "run", drafter)
    with pytest.raises(ExportError, match=f"fc.weight {why}"):
        export(run, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_an_export_says_which_checkpoint_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path / "run", drafter_for(tiny_target("qwen3")))
    with caplog.at_level(logging.INFO):
        assert main(read(["export", str(run / "best"), str(tmp_path / "out")])) == 0
    assert f"exporting {run}/checkpoints/step-00000042" in caplog.text
