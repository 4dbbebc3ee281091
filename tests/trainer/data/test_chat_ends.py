"""Where an answer begins and ends, in templates whose prompts, marks and tokens differ from most."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.trainer import chatting
from tests.trainer.data.test_chat import TOKENIZER, TWO_TURNS, message, stretches
from trainer.data.chat import ChatEncoder, EncodedChat
from trainer.data.documents import DataError
from trainer.data.records import Chat

OPENING_TAGS = (
    "{% for m in messages %}{{ '<|header|>' if m.role == 'user' else '<|header_end|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|header_end|>{% endif %}"
)
MARKED_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "<think>\n\n</think>\n\n{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
MARKED_OPENER = (
    "{% for m in messages %}\n{% if m.role == 'assistant' %}\n  {%- generation -%}\n<|im_start|>assistant\n"
    "{{ m.content }}<|im_end|>\n{%- endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)


def encoded(template: str, *messages: dict[str, Any], tokenizer: Any = TOKENIZER, **more: Any) -> EncodedChat:
    return ChatEncoder(tokenizer, template, {}, **more).encode(Chat(list(messages)))


def written(template: str, *messages: dict[str, Any], tokenizer: Any = TOKENIZER, **more: Any) -> list[str]:
    return stretches(tokenizer, encoded(template, *messages, tokenizer=tokenizer, **more))


def blank_merging() -> Any:
    """A tokenizer after the manner of Llama 2's: blanks are part of the words behind them."""
    words = "What is the capital of Peru? Peru Lima. longest river in France? France Loire. Good day. See you! Bye."
    pieces = sorted({f"\u2581{word}" for word in f"{words} The Hello? [/INST]".split()})
    alphabet = sorted({character for piece in pieces for character in piece} | set("[INST]<s>/"))
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "<s>", "</s>", *pieces, *alphabet])}
    scored = [(piece, -1.0 if piece in pieces else -9.0) for piece in vocabulary]
    inner = Tokenizer(models.Unigram(scored, unk_id=0))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Replace("\u2581", " ")
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_a_token_that_begins_at_the_templates_blank_is_the_answers() -> None:
    tokenizer = blank_merging()
    tokens = tokenizer.tokenize(tokenizer.apply_chat_template(list(TWO_TURNS), chat_template=LLAMA_2, tokenize=False))
    assert "\u2581Good" in tokens
    assert written(LLAMA_2, *TWO_TURNS, tokenizer=tokenizer) == [" Good day. </s>", " See you! </s>"]


def test_a_special_token_that_opens_the_users_turn_does_not_end_the_answer() -> None:
    assert written(OPENING_TAGS, *TWO_TURNS) == ["Good day.", "See you!"]


def test_a_special_token_that_opens_every_turn_does_not_end_the_answer() -> None:
    """It stands behind questions and answers alike, but also where the generation prompt begins."""
    assert written(chatting.TRIMMING.replace("<|eot|>", ""), *TWO_TURNS) == ["Good day.", "See you!"]


def test_a_token_between_turns_ends_the_answer_if_it_ends_the_question_too() -> None:
    template = chatting.CHATML.replace("<|im_end|>", "{% if not loop.last %}<|end|>{% endif %}")
    assert written(template, *TWO_TURNS) == ["Good day.<|end|>", "See you!"]
    role_tags = OPENING_TAGS.replace("<|header|>", "<|header|><|message|>")
    assert written(role_tags, *TWO_TURNS) == ["Good day.", "See you!"], "two tokens, neither of which ends a question"


def test_a_template_that_opens_an_answer_unasked_does_not_end_one_by_it() -> None:
    template = OPENING_TAGS.replace("{% if add_generation_prompt %}<|header_end|>{% endif %}", "<|header_end|>")
    assert written(template, *TWO_TURNS) == ["Good day.", "See you!"]


def test_the_ends_of_the_generation_config_are_learned_though_they_open_a_turn() -> None:
    (number,) = TOKENIZER.encode("<|header|>", add_special_tokens=False)
    assert written(OPENING_TAGS, *TWO_TURNS, ends=(number,)) == ["Good day.<|header|>", "See you!"]


def test_an_end_that_was_added_as_an_ordinary_token_is_learned() -> None:
    tokenizer = chatting.tokenizer()
    tokenizer.add_tokens([AddedToken("<over>", special=False, normalized=False)])
    template = chatting.CHATML.replace("<|im_end|>", "<over>")
    assert written(template, *TWO_TURNS, tokenizer=tokenizer) == ["Good day.<over>", "See you!<over>"]


def test_an_end_of_the_generation_config_may_be_any_token() -> None:
    template = chatting.CHATML.replace("<|im_end|>", "~")
    (number,) = TOKENIZER.encode("~", add_special_tokens=False)
    assert written(template, *TWO_TURNS, ends=(number,)) == ["Good day.~", "See you!~"]


@pytest.mark.parametrize("template", [MARKED_THOUGHT, MARKED_OPENER], ids=["thought", "opener"])
def test_what_the_generation_prompt_gives_is_not_supervised_though_it_is_marked(template: str) -> None:
    assert written(template, *TWO_TURNS) == ["Good day.<|im_end|>", "See you!<|im_end|>"]


def test_the_part_of_a_prompt_that_stands_before_an_answer_without_reasoning_is_not_supervised() -> None:
    prompt = "{% if add_generation_prompt %}<|start|><think>\n{% endif %}"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|start|>{{ m.content }}<|end|>\n"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + prompt
    )
    assert written(template, *TWO_TURNS) == ["Good day.<|end|>", "See you!<|end|>"]


def test_two_tokens_end_an_answer_if_the_target_stops_at_the_second() -> None:
    (number,) = TOKENIZER.encode("<|eot|>", add_special_tokens=False)
    template = chatting.CHATML.replace("<|im_end|>", "<|end|><|eot|>")
    assert written(template, *TWO_TURNS, ends=(number,)) == ["Good day.<|end|><|eot|>", "See you!<|end|><|eot|>"]
    stopping = TOKENIZER.encode("<|end|>", add_special_tokens=False)
    assert written(template, *TWO_TURNS, ends=(number, *stopping)) == ["Good day.<|end|>", "See you!<|end|>"]


def test_calls_that_the_template_hides_are_reported() -> None:
    found = encoded(chatting.CHATML, TWO_TURNS[0], message("assistant", "", tool_calls=[{"name": "clock"}]))
    assert found.untellable
    assert not found.supervised.any()


def test_marks_are_followed_inside_blocks_that_the_template_keeps_for_later() -> None:
    kept = chatting.MARKED.replace("{% for m", "{% set all %}{% for m") + "{% endset %}<bos>{{ all }}"
    assert written(kept, *TWO_TURNS) == ["Good day.<|im_end|>", "See you!<|im_end|>"]


LEAKING = (
    "{% for m in messages %}{% if loop.index == 3 %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_question_is_not_supervised_though_it_is_marked() -> None:
    assert written(LEAKING, *TWO_TURNS) == ["Good day.<|im_end|>", "See you!<|im_end|>"]


def test_a_template_that_marks_a_later_question_and_hides_what_the_target_is_given_is_refused() -> None:
    with pytest.raises(DataError, match="what it marks holds a question of the user"):
        ChatEncoder(TOKENIZER, "{{ messages | length }}" + LEAKING, {})


def test_reasoning_that_the_template_drops_is_reported() -> None:
    asked = message("user", "2 + 2?")
    for thinking in (
        message("assistant", "<think>\nHm.\n</think>\n\nFour."),
        message("assistant", "Hm.\n</think>\n\nFour."),
        message("assistant", "Four.", reasoning_content="Hm."),
    ):
        assert encoded(DROPPING, asked, thinking).reasoning_dropped
    assert encoded(chatting.REASONING, asked, thinking, asked, message("assistant", "Four.")).reasoning_dropped
    assert not encoded(chatting.REASONING, asked, thinking).reasoning_dropped
    assert not encoded(DROPPING, asked, message("assistant", "<think>\n\n</think>\n\nFour.")).reasoning_dropped
    assert not encoded(DROPPING, *TWO_TURNS).reasoning_dropped


def test_several_templates_without_a_default_are_one_sentence_and_one_for_tools_is_taken_for_tools() -> None:
    tokenizer = chatting.tokenizer()
    tokenizer.chat_template = {"rag": chatting.CHATML}
    with pytest.raises(DataError, match=r"several chat templates \(rag\) and none of them is called default"):
        ChatEncoder(tokenizer, None, {})
    tokenizer.chat_template = {"default": chatting.CHATML, "tool_use": chatting.MARKED.replace("im_end", "eot")}
    found = ChatEncoder(tokenizer, None, {}).encode(Chat(list(TWO_TURNS), [{"type": "function", "function": {}}]))
    assert stretches(tokenizer, found) == ["Good day.<|eot|>", "See you!<|eot|>"]
