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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from tests.trainer.tiny_models import SIZES, drafter_for, overfit, save_target, tiny_target
from trainer.arguments import read
from trainer.commands.evaluate import EvaluationError, evaluate, main, set_result
from trainer.commands.evaluation_journal import Answered, Journal, JournalError
from trainer.commands.export import export
from trainer.config.sections import CheckpointConfig
from trainer.data.prompts import Prompt
from trainer.drafter.decoding import Generation, Limits, Sampling, SpeculativeDecoder
from trainer.drafter.released import write_drafter
from trainer.pretrained import TargetError
from trainer.run import checkpoint
from trainer.run.checkpoint import find_drafter

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
    assert main(read(["evaluate", *words])) == 0
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


def trained(folder: Path, served: tuple[Path, Path, Path], **data: Any) -> Path:
    """A run directory whose checkpoint is the served drafter."""
    target = {"path": str(served[0]), "dtype": "float32"}
    checkpoint.save(
        folder / "checkpoints",
        7,
        model=load_file(served[1] / "model.safetensors"),
        optimizer={"step": torch.zeros(1)},
        drafter_config=json.loads((served[1] / "config.json").read_text()),
        run={"config": {"target": target, "data": {"sources": ["answers.jsonl"], **data}}},
        metrics={},
        keep=CheckpointConfig(),
    )
    return folder


def test_a_run_directory_knows_its_target_and_sampling_follows_the_seed(
    served: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    prompts = served[2]
    trained(tmp_path, served)
    outputs = []
    for name in ("a.json", "b.json"):
        words = [str(tmp_path), "--prompts", str(prompts), "--max-new-tokens", "12", "--device", "cpu"]
        assert (
            main(
                read(
                    ["evaluate", *words, "--temperature", "0.7", "--max-prompts", "2", "--output", str(tmp_path / name)]
                )
            )
            == 0
        )
        (result,) = json.loads((tmp_path / name).read_text())["sets"]
        outputs.append((result["tokens"], result["acceptance_length"], result["histogram"]))
        assert result["answers"] == 2
        assert result["identical"] is None
    assert outputs[0] == outputs[1]


def test_a_run_is_evaluated_with_the_chat_template_and_variables_that_it_was_trained_with(
    served: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("w{{ opening }} {{ messages[0].content }} w{{ closing }}")
    trained(tmp_path, served, chat_template=str(template), chat_template_kwargs={"opening": 7, "closing": 8})
    seen: list[list[int]] = []
    plain = SpeculativeDecoder.plain

    def watched(self: SpeculativeDecoder, prompt: Any, *rest: Any) -> Generation:
        seen.append(list(prompt))
        return plain(self, prompt, *rest)

    monkeypatch.setattr(SpeculativeDecoder, "plain", watched)
    output = tmp_path / "evaluation.json"
    words = [str(tmp_path), "--prompts", str(served[2]), "--max-prompts", "1", "--max-new-tokens", "2"]
    words += ["--device", "cpu", "--output", str(output)]
    assert main(read(["evaluate", *words])) == 0
    assert seen[-1] == [7, 10, 11, 12, 8]
    assert main(read(["evaluate", *words, "--template-option", "closing=9"])) == 0
    assert seen[-1] == [7, 10, 11, 12, 9]
    assert json.loads(output.read_text())["chat_template_kwargs"] == {"opening": 7, "closing": 9}


def test_prompt_files_of_one_name_are_both_measured(served: tuple[Path, Path, Path], tmp_path: Path) -> None:
    words = [str(served[1]), "--target", str(served[0]), "--dtype", "float32", "--device", "cpu"]
    for number, folder in enumerate(("a", "b"), 1):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "questions.jsonl").write_text('{"prompt": "w10"}\n' * number)
        words += ["--prompts", str(tmp_path / folder / "questions.jsonl")]
    words += ["--max-new-tokens", "2", "--output", str(tmp_path / "evaluation.json")]
    assert main(read(["evaluate", *words])) == 0
    assert [found["answers"] for found in json.loads((tmp_path / "evaluation.json").read_text())["sets"]] == [1, 2]


def test_exports_without_a_target_and_folders_without_a_drafter_are_refused(
    served: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match="--target"):
        main(read(["evaluate", str(served[1]), "--device", "cpu"]))
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        find_drafter(tmp_path)


def test_later_turns_are_asked_behind_the_answers_before_them(served: tuple[Path, Path, Path]) -> None:
    target = tiny_target("llama")
    seen: list[list[int]] = []

    class Recording(SpeculativeDecoder):
        def plain(self, prompt: Any, *rest: Any) -> Generation:
            seen.append(list(prompt))
            return super().plain(prompt, *rest)

    decoder = Recording(target, drafter_for(target))
    tokenizer = AutoTokenizer.from_pretrained(served[0])
    prompts = [Prompt("id", tuple(({"role": "user", "content": text},) for text in ("w10 w11", "w12")))]
    result = evaluate(decoder, tokenizer, prompts, "turns", limits=Limits(4), sampling=Sampling(), block_size=6)
    assert result.answers == 2
    first, second = seen[-2:]
    assert second[: len(first) - 1] == first[:-1]
    assert len(second) > len(first) + 2


def test_summaries_average_over_answers_as_officially_and_survive_answers_without_a_pass() -> None:
    alone = [Generation([5] * 4, [1] * 3, 4.0), Generation([2], [], 0.5)]
    helped = [Generation([5] * 4, [2, 1], 2.0), Generation([2], [], 0.5)]
    result = set_result("s", list(zip(alone, helped, strict=True)), greedy=True)
    assert (result.acceptance_length, result.pooled_acceptance_length) == (1.5, 1.5)
    assert result.identical == 2
    assert result.passes_saved == pytest.approx(1 / 5)  # two prompts and two blocks for five tokens
    assert result.histogram == {1: 0.5, 2: 0.5}
    assert result.speedup == pytest.approx((1.0 + 0.5) / (0.5 + 0.5))
    nothing = set_result("s", [(alone[1], helped[1])], greedy=True)
    assert nothing.acceptance_length != nothing.acceptance_length


def test_an_interrupted_evaluation_goes_on_and_ends_as_one_that_was_not(
    served: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        str(served[1]),
        "--target",
        str(served[0]),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--temperature",
        "0.7",
    ]
    words += ["--prompts", str(served[2]), "--max-new-tokens", "8"]
    whole, output = tmp_path / "whole.json", tmp_path / "evaluation.json"
    assert main(read(["evaluate", *words, "--output", str(whole)])) == 0
    unfinished = tmp_path / "evaluation.json.unfinished.jsonl"
    plain, asked = SpeculativeDecoder.plain, 0

    def failing(self: SpeculativeDecoder, *arguments: Any) -> Generation:
        nonlocal asked
        asked += 1
        if asked == 4:  # to warm up, two answers, and no more
            raise KeyboardInterrupt
        return plain(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SpeculativeDecoder, "plain", failing)
        with pytest.raises(KeyboardInterrupt):
            main(read(["evaluate", *words, "--output", str(output)]))
    assert not output.exists()
    with unfinished.open("ab") as file:
        file.write(b'{"set": 0, "prom')  # as a killed process leaves it
    asked = 10

    def counting(self: SpeculativeDecoder, *arguments: Any) -> Generation:
        nonlocal asked
        asked += 1
        return plain(self, *arguments)

    monkeypatch.setattr(SpeculativeDecoder, "plain", counting)
    assert main(read(["evaluate", *words, "--output", str(output)])) == 0
    assert asked == 12, "one answer, and one to warm up"
    assert not unfinished.exists()
    kept = ("answers", "acceptance_length", "tokens", "histogram", "refused")
    (first,), (second,) = (json.loads(path.read_text())["sets"] for path in (whole, output))
    assert {key: first[key] for key in kept} == {key: second[key] for key in kept}


def test_what_was_kept_under_other_settings_is_not_taken_up(tmp_path: Path) -> None:
    output = tmp_path / "evaluation.json"
    pair = (Generation([1], [], 0.5), Generation([1], [1], 0.25))
    first = Journal(output, {"seed": 0})
    first.write(0, 3, Answered([pair], "no"))
    with pytest.raises(JournalError, match="is being written by another process"):
        Journal(output, {"seed": 0})
    del first
    again = Journal(output, {"seed": 0})
    assert again.found == {(0, 3): Answered([pair], "no")}
    del again
    assert Journal(output, {"seed": 1}).found == {}


def test_an_output_that_cannot_be_written_is_said_before_the_work(
    served: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    words = [str(served[1]), "--target", str(served[0]), "--prompts", str(served[2]), "--device", "cpu"]
    with pytest.raises(JournalError, match=r"missing/x.json cannot be written: No such file or directory"):
        main(read(["evaluate", *words, "--output", str(tmp_path / "missing" / "x.json")]))
    with pytest.raises(JournalError, match="is a folder: name a file in it"):
        main(read(["evaluate", *words, "--output", str(tmp_path)]))


def test_a_prompt_that_the_template_refuses_is_counted_and_does_not_end_the_evaluation(
    served: tuple[Path, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "w3 {{ messages[0].content }} w5"
    )
    trained(tmp_path, served, chat_template=str(template))
    prompts = tmp_path / "prompts.jsonl"
    refused = {"messages": [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]}
    prompts.write_text("".join(json.dumps(record) + "\n" for record in ({"prompt": "w10"}, refused)))
    words = [str(tmp_path), "--max-new-tokens", "2", "--device", "cpu", "--output", str(tmp_path / "evaluation.json")]
    assert main(read(["evaluate", *words, "--prompts", str(prompts)])) == 0
    (found,) = json.loads((tmp_path / "evaluation.json").read_text())["sets"]
    assert (found["answers"], found["refused"]) == (1, 1)
    assert "the chat template refused 1 prompt, the first because no system turn" in caplog.text
    prompts.write_text(json.dumps(refused) + "\n")
    with pytest.raises(EvaluationError, match=r"the chat template refused every prompt of prompts.* no system turn"):
        main(read(["evaluate", *words, "--prompts", str(prompts)]))


def gpt2(folder: Path, positions: int = 40) -> tuple[Path, Path]:
    """Folders of a target that has learned so many positions, and of an untrained drafter for it."""
    config = CONFIG_MAPPING["gpt2"](**SIZES | {"max_position_embeddings": positions})
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    save_target(target, folder / "target")
    drafter = drafter_for(target)
    (folder / "drafter").mkdir()
    write_drafter(folder / "drafter", drafter.config, drafter.state_dict(), torch.float32)
    return folder / "target", folder / "drafter"


def test_prompts_and_answers_are_refused_before_they_pass_the_targets_last_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = gpt2(tmp_path)
    prompts = tmp_path / "turns.jsonl"
    prompts.write_text('{"prompt": "w10"}\n{"turns": ["w10 w11", "w12 w13"]}\n')
    words = ["evaluate", str(drafter), "--target", str(target), "--dtype", "float32", "--device", "cpu"]
    words += ["--prompts", str(prompts)]
    with monkeypatch.context() as patch:
        patch.setattr("trainer.commands.evaluate.load_model", lambda *_: pytest.fail("loaded"))
        why = "learned 40 positions, too few for prompt 2 of turns, which has 8 tokens, and 2 answers of up to 30: "
        with pytest.raises(TargetError, match=why + "give --max-new-tokens 16 or less") as caught:
            main(read([*words, "--max-new-tokens", "30"]))
        prompts.write_text(json.dumps({"prompt": "w10 " * 40}))
        with pytest.raises(TargetError, match="leave it out"):
            main(read(words))
    prompts.write_text('{"turns": ["w10 w11", "w12 w13"]}\n')
    assert main(read([*words, "--max-new-tokens", str(caught.value).split()[-3]])) == 0


def test_greedy_answers_in_float32_that_differ_are_a_failure_after_all_is_written(
    served: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, drafter, prompts = served
    speculative = SpeculativeDecoder.speculative

    def wrong(self: SpeculativeDecoder, *given: Any) -> Generation:
        right = speculative(self, *given)
        return Generation([*right.tokens[:-1], right.tokens[-1] ^ 1], right.accepted, right.seconds)

    monkeypatch.setattr(SpeculativeDecoder, "speculative", wrong)
    output = tmp_path / "evaluation.json"
    words = ["evaluate", str(drafter), "--target", str(target), "--device", "cpu", "--prompts", str(prompts)]
    words += ["--max-new-tokens", "6", "--output", str(output)]
    assert main(read([*words, "--dtype", "float32"])) == 1
    assert json.loads(output.read_text())["sets"][0]["identical"] == 0
    assert "3 answers differ from the target's own" in caplog.text
    assert main(read([*words, "--dtype", "bfloat16"])) == 0  # rounding may part them


def test_what_was_not_measured_is_null_in_the_output(served: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, drafter, prompts = served
    output = tmp_path / "evaluation.json"
    words = ["evaluate", str(drafter), "--target", str(target), "--device", "cpu", "--prompts", str(prompts)]
    assert main(read([*words, "--dtype", "float32", "--max-new-tokens", "1", "--output", str(output)])) == 0
    (found,) = json.loads(output.read_text(), parse_constant=pytest.fail)["sets"]
    assert found["acceptance_length"] is found["pooled_acceptance_length"] is None
    assert export(drafter, tmp_path / "out", evaluation=output)
    assert "| questions | – |" in (tmp_path / "out" / "README.md").read_text()
