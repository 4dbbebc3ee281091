"""Which tokens of a chat are the assistant's: by template, whatever the template does."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.trainer import chatting
from trainer.data.chat import ChatEncoder, EncodedChat
from trainer.data.documents import DataError
from trainer.data.records import Chat
from trainer.data.templates import RefusedChatError

TOKENIZER = chatting.tokenizer()


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def written(template: str, *messages: dict[str, Any], **variables: Any) -> list[str]:
    """Texts of the supervised stretches."""
    encoded = ChatEncoder(TOKENIZER, template, variables).encode(Chat(list(messages)))
    return stretches(TOKENIZER, encoded)


def stretches(tokenizer: Any, encoded: EncodedChat) -> list[str]:
    """Texts of the supervised stretches."""
    pairs = zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True)
    found = groupby(pairs, key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in stretch]) for flag, stretch in found if flag]


TWO_TURNS = (
    message("user", "Hello?"),
    message("assistant", "Good day."),
    message("user", "Bye."),
    message("assistant", "See you!"),
)


@pytest.mark.parametrize(
    ("template", "endings"),
    [
        (chatting.CHATML, ["<|im_end|>"] * 2),
        (chatting.MARKED, ["<|im_end|>"] * 2),
        (chatting.TRIMMING, ["<|eot|>"] * 2),
        (chatting.RENAMING, ["<end_of_turn>"] * 2),
    ],
    ids=["chatml", "marked", "trimming", "renaming"],
)
def test_the_answers_and_the_tokens_that_end_them_are_supervised(template: str, endings: list[str]) -> None:
    assert written(template, *TWO_TURNS) == [f"Good day.{endings[0]}", f"See you!{endings[1]}"]


def test_a_template_without_generation_prompt_is_read_too() -> None:
    """What such a target is given ends before the template's blank: the blank is its own to write."""
    assert written(chatting.INSTRUCTING, *TWO_TURNS) == [" Good day.</s>", " See you!</s>"]


def test_trimmed_answers_are_found_where_the_template_put_them() -> None:
    spaced = (message("user", "Hello?"), message("assistant", "\n  Good day. \n\n"))
    assert written(chatting.TRIMMING, *spaced) == ["Good day.<|eot|>"]


def test_a_system_turn_is_not_supervised() -> None:
    assert written(chatting.CHATML, message("system", "Be kind."), *TWO_TURNS)[0] == "Good day.<|im_end|>"


def test_reasoning_in_the_last_answer_belongs_to_it_with_its_opening() -> None:
    answer = message("assistant", "<think>\nHm.\n</think>\n\nFour.")
    assert written(chatting.REASONING, message("user", "2 + 2?"), answer) == [
        "<think>\nHm.\n</think>\n\nFour.<|im_end|>"
    ]


def test_reasoning_that_the_template_drops_from_earlier_answers_is_not_missed() -> None:
    earlier = message("assistant", "<think>\nHm.\n</think>\n\nFour.")
    found = written(
        chatting.REASONING, message("user", "2 + 2?"), earlier, message("user", "Sure?"), message("assistant", "Yes.")
    )
    assert found == ["Four.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]


def test_reasoning_in_a_field_of_its_own_is_the_assistants() -> None:
    answer = message("assistant", "Four.", reasoning_content="Hm.")
    assert written(chatting.REASONING, message("user", "2 + 2?"), answer) == [
        "<think>\nHm.\n</think>\n\nFour.<|im_end|>"
    ]


def test_what_the_generation_prompt_gives_is_not_supervised() -> None:
    found = written(chatting.REASONING, *TWO_TURNS, thinking=False)
    assert found == ["Good day.<|im_end|>", "See you!<|im_end|>"], "the empty thought is given to the target"


def test_a_prompt_that_opens_the_reasoning_is_not_taken_from_an_earlier_turn() -> None:
    found = written(chatting.OPENING, *TWO_TURNS)
    assert found == ["Good day.<|im_end|>", "\n</think>\n\nSee you!<|im_end|>"]


def test_a_question_that_quotes_such_a_prompt_is_not_taken_for_the_opening_of_its_answer() -> None:
    """An earlier turn shows no opened reasoning, so the prompt's only likeness is the quotation."""
    quoting = message("user", "What is <|im_start|>assistant\n<think>\n for?")
    found = written(chatting.OPENING, quoting, message("assistant", "Thought."), *TWO_TURNS[:2])
    assert found[0] == "Thought.<|im_end|>"
    hiding = chatting.OPENING.replace("{% for m in messages %}", "{% for m in messages if m.role != 'note' %}")
    noted = (quoting, message("assistant", "Thought."), message("note", "hidden"), message("assistant", "More."))
    found = written(hiding, *noted, *TWO_TURNS[:2])
    assert found[:2] == ["Thought.<|im_end|>", "More.<|im_end|>"]


def test_tool_calls_are_written_by_the_assistant() -> None:
    call = message("assistant", "", tool_calls=[{"name": "clock"}])
    found = written(
        chatting.REASONING, message("user", "Time?"), call, message("tool", "Noon"), message("assistant", "Noon.")
    )
    assert found[0] == "<tool_call>clock</tool_call><|im_end|>"
    assert found[1].endswith("Noon.<|im_end|>")


def test_channels_belong_to_the_answer() -> None:
    found = written(
        chatting.CHANNELS,
        message("user", "2 + 2?"),
        message("assistant", "Four.", thinking="Hm."),
        message("user", "Sure?"),
        message("assistant", "Yes."),
    )
    assert found == [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|end|>",
        "<|channel|>final<|message|>Yes.<|return|>",
    ]


def test_an_empty_answer_supervises_the_end_of_the_turn_only() -> None:
    assert written(chatting.CHATML, message("user", "Hello?"), message("assistant", "")) == ["<|im_end|>"]


def test_a_question_that_quotes_the_template_is_not_supervised() -> None:
    quoting = message("user", "Say <|im_start|>assistant\nGood day.<|im_end|>\n<|im_start|>assistant\n")
    assert written(chatting.CHATML, quoting, message("assistant", "Good day.")) == ["Good day.<|im_end|>"]


def test_an_answer_that_repeats_its_question_is_told_apart() -> None:
    assert written(chatting.CHATML, message("user", "Ha"), message("assistant", "Ha")) == ["Ha<|im_end|>"]


def test_a_token_that_merges_template_and_answer_is_the_answers() -> None:
    """The prompt's newline and the answer's first are one token, by which the answer begins."""
    answer = message("assistant", "\n\nGood day.")
    text = TOKENIZER.apply_chat_template([message("user", "Hello?"), answer], tokenize=False)
    assert TOKENIZER.tokenize(text).count("ĊĊ") == 1
    assert written(chatting.CHATML, message("user", "Hello?"), answer) == ["\n\n\nGood day.<|im_end|>"]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\ue0f0"), max_size=30).filter(
    lambda text: not text[:1].isspace()
)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
@example([("<|im_start|>assistant\n", "<|im_start|>assistant\n")])
@example([("<|im_end|>", "<|im_end|>"), ("", "")])
@settings(max_examples=100, deadline=None)
def test_any_text_is_supervised_exactly(turns: list[tuple[str, str]]) -> None:
    messages = [
        message(role, text) for question, answer in turns for role, text in (("user", question), ("assistant", answer))
    ]
    encoded = ChatEncoder(TOKENIZER, chatting.CHATML, {}).encode(Chat(messages))
    assert not encoded.untellable
    assert TOKENIZER.decode(encoded.ids) == TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(encoded.ids[encoded.supervised]) == "".join(f"{answer}<|im_end|>" for _, answer in turns)


def test_tokens_are_those_that_the_template_gives() -> None:
    ids = ChatEncoder(TOKENIZER, None, {}).encode(Chat(list(TWO_TURNS))).ids
    assert ids.dtype == np.int32
    assert ids.tolist() == TOKENIZER.apply_chat_template(list(TWO_TURNS), return_dict=True)["input_ids"]


def test_a_template_that_drops_answers_is_refused_and_the_cure_named() -> None:
    with pytest.raises(DataError, match=r"does not show which tokens the assistant wrote.*data.chat_template"):
        ChatEncoder(TOKENIZER, chatting.FORGETFUL, {})


def test_a_template_that_rewrites_answers_is_refused() -> None:
    with pytest.raises(DataError, match="does not show which tokens the assistant wrote"):
        ChatEncoder(TOKENIZER, chatting.SHOUTING, {})


def test_a_missing_template_is_an_error_that_names_the_cure() -> None:
    with pytest.raises(DataError, match=r"no chat template; name one in data.chat_template"):
        ChatEncoder(chatting.tokenizer(None), None, {})


def test_a_chat_that_the_template_refuses_is_refused_with_its_words() -> None:
    encoder = ChatEncoder(TOKENIZER, chatting.RENAMING, {})
    with pytest.raises(RefusedChatError, match="no system turn"):
        encoder.encode(Chat([message("system", "Be kind."), *TWO_TURNS]))


def test_a_turn_that_the_template_hides_is_reported_and_not_guessed() -> None:
    hiding = chatting.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.content != 'secret' %}")
    encoded = ChatEncoder(TOKENIZER, hiding, {}).encode(
        Chat([*TWO_TURNS, message("user", "And?"), message("assistant", "secret")])
    )
    assert encoded.untellable
    assert TOKENIZER.decode(encoded.ids[encoded.supervised]) == "Good day.<|im_end|>See you!<|im_end|>"


def test_a_chat_with_the_stand_in_character_is_left_out() -> None:
    encoded = ChatEncoder(TOKENIZER, chatting.CHATML, {}).encode(
        Chat([message("user", "Hello?"), message("assistant", "odd \ue0f0 answer")])
    )
    assert encoded.untellable
    assert not encoded.supervised.any()
