"""Evaluation: real prompts through real decoding, with the official benchmark's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.tiny_models import drafter_for, overfit, save_target, tiny_target
from trainer import checkpoint
from trainer.config import CheckpointConfig
from trainer.decoding import Generation, Limits, Sampling, Writer
from trainer.drafter.released import find_drafter, write_drafter
from trainer.evaluate import (
    HUMAN_EVAL,
    EvaluationError,
    Prompt,
    encode,
    evaluate,
    main,
    read_prompts,
    summarise,
)

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

QUESTIONS = ["w10 w11 w12", "w20 w21 w22 w23", "w30"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Folders of a target and an overfit drafter, and a prompt file."""
    root = tmp_path_factory.mktemp("served")
    target = tiny_target("llama")
    drafter = drafter_for(target)
    texts = []
    for question in QUESTIONS:
        ids = [3, *(int(word[1:]) for word in question.split()), 5]  # as the chat template renders it
        texts.append(target.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)[0].tolist())
    for text in texts * 6:
        overfit(target, drafter, text, steps=15)
    save_target(target, root / "target")
    (root / "drafter").mkdir()
    write_drafter(root / "drafter", drafter.config, drafter.state_dict(), torch.float32)
    prompts = root / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    return root / "target", root / "drafter", prompts


def test_measured_acceptance_is_what_the_official_package_measures_for_the_same_export_and_prompts(
    official: ModuleType, served: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_folder, drafter_folder, prompts = served
    output = tmp_path / "evaluation.json"
    words = [str(drafter_folder), "--target", str(target_folder), "--dtype", "float32", "--device", "cpu"]
    words += ["--prompts", str(prompts), "--max-new-tokens", "25", "--output", str(output)]
    assert main(words) == 0
    (ours,) = json.loads(output.read_text())["sets"]
    assert ours["identical"] == ours["answers"] == len(QUESTIONS)
    assert "questions" in capsys.readouterr().out

    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    drafter = official.DFlashDraftModel.from_pretrained(drafter_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    lengths = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)
        stop = [target.generation_config.eos_token_id]
        lengths.append(official.dflash_generate(drafter, target, ids, 25, stop, return_stats=True).acceptance_lengths)
    assert ours["acceptance_length"] == pytest.approx(mean(mean(x) for x in lengths if x))
    assert ours["pooled_acceptance_length"] == pytest.approx(mean(n for x in lengths for n in x))
    assert ours["acceptance_length"] > 1.5


def test_a_run_directory_knows_its_target_and_sampling_follows_the_seed(
    served: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target_folder, drafter_folder, prompts = served
    checkpoint.save(
        tmp_path / "checkpoints",
        7,
        model=load_file(drafter_folder / "model.safetensors"),
        optimizer={"step": torch.zeros(1)},
        drafter_config=json.loads((drafter_folder / "config.json").read_text()),
        run={"config": {"target": {"path": str(target_folder), "dtype": "float32"}}},
        metrics={},
        keep=CheckpointConfig(),
    )
    outputs = []
    for name in ("a.json", "b.json"):
        words = [str(tmp_path), "--prompts", str(prompts), "--max-new-tokens", "12", "--device", "cpu"]
        assert main([*words, "--temperature", "0.7", "--max-prompts", "2", "--output", str(tmp_path / name)]) == 0
        (result,) = json.loads((tmp_path / name).read_text())["sets"]
        outputs.append((result["tokens"], result["acceptance_length"], result["histogram"]))
        assert result["answers"] == 2
        assert result["identical"] is None
    assert outputs[0] == outputs[1]


def test_exports_without_a_target_and_folders_without_a_drafter_are_refused(
    served: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match="--target"):
        main([str(served[1]), "--device", "cpu"])
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        find_drafter(tmp_path)


def test_human_eval_has_its_164_problems_in_the_official_wording() -> None:
    prompts = read_prompts(HUMAN_EVAL)
    assert len(prompts) == 164
    assert prompts[0].turns[0].startswith("Write a solution to the following problem and make sure")
    assert "def has_close_elements" in prompts[0].turns[0]
    assert len(read_prompts(HUMAN_EVAL, 3)) == 3


def test_a_line_is_a_prompt_turns_or_a_chat_whose_last_answer_is_left_out(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "known"},
    ]
    lines = [{"prompt": "p"}, {"turns": ["a", "b"]}, {"messages": chat, "source": "ignored"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_prompts(str(path)) == [
        Prompt((), ("p",)),
        Prompt((), ("a", "b")),
        Prompt(({"role": "system", "content": "s"},), ("u",)),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ("[1]", "not an object"),
        ('{"text": "x"}', "needs prompt"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no user message"),
        ('{"messages": [{"role": "user", "content": 3}]}', "must be texts"),
        ('{"turns": [1]}', "must be texts"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_the_cure(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(EvaluationError, match=says):
        read_prompts(str(path))


def test_missing_and_empty_prompt_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_prompts(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(EvaluationError, match="holds no prompts"):
        read_prompts(str(tmp_path / "empty.jsonl"))


def test_later_turns_are_asked_behind_the_answers_before_them(served: tuple[Path, Path, Path]) -> None:
    target = tiny_target("llama")
    seen: list[list[int]] = []

    class Recording(Writer):
        def plain(self, prompt: Any, *rest: Any) -> Generation:
            seen.append(list(prompt))
            return super().plain(prompt, *rest)

    writer = Recording(target, drafter_for(target))
    tokenizer = AutoTokenizer.from_pretrained(served[0])
    prompts = [Prompt((), ("w10 w11", "w12"))]
    result = evaluate(writer, tokenizer, prompts, "turns", limits=Limits(4), sampling=Sampling(), block_size=6)
    assert result.answers == 2
    first, second = seen[-2:]
    assert second[: len(first) - 1] == first[:-1]
    assert len(second) > len(first) + 2


def test_a_tokenizer_without_a_chat_template_reads_the_plain_text(tmp_path: Path) -> None:
    folder = save_target(tiny_target("llama"), tmp_path, chat=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert encode(tokenizer, [{"role": "user", "content": "w10 w11"}], {}) == [10, 11]


def test_summaries_average_over_answers_as_officially_and_survive_answers_without_a_pass() -> None:
    alone = [Generation([5] * 4, [1] * 3, 4.0), Generation([2], [], 0.5)]
    helped = [Generation([5] * 4, [2, 1], 2.0), Generation([2], [], 0.5)]
    result = summarise("s", list(zip(alone, helped, strict=True)), greedy=True)
    assert (result.acceptance_length, result.pooled_acceptance_length) == (1.5, 1.5)
    assert result.identical == 2
    assert result.histogram == {1: 0.5, 2: 0.5}
    assert result.speedup == pytest.approx((1.0 + 0.5) / (0.5 + 0.5))
    nothing = summarise("s", [(alone[1], helped[1])], greedy=True)
    assert nothing.acceptance_length != nothing.acceptance_length
