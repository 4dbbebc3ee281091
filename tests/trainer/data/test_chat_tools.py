"""Tool calls: rendered as they are served, and told apart from what the tools answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import chatting
from tests.trainer.data.test_chat import TOKENIZER, message, stretches
from trainer.data.chat import ChatEncoder
from trainer.data.prompts import prompt_tokens
from trainer.data.records import Chat, parse

# The three kinds of templates: one goes through the arguments as a mapping, one writes what it gets as JSON, one joins
# them to other text.
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls | default([]) %}"
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MAPPING = (
    HEAD
    + "<call {{ c.function.name }}>{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    + TAIL
)
ENCODING = HEAD + "<call {{ c.function.name }}>{{ c.function.arguments | tojson }}" + TAIL
JOINING = HEAD + "{{ '<call ' + c.function.name + '>' + c.function.arguments }}" + TAIL

# The result of a call stands inside the assistant's turn, which goes on behind it.
INSIDE = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if not ns.tool %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% set ns.tool = false %}"
    "{% for c in m.tool_calls | default([]) %}[call]{{ c.function.name }}{{ c.function.arguments | tojson }}[/call]"
    "{% set ns.tool = true %}{% endfor %}"
    "{% if m.tool_calls %}{% set results = namespace(on=true) %}{% for r in messages[loop.index:] %}"
    "{% if r.role != 'tool' %}{% set results.on = false %}"
    "{% elif results.on %}[result]{{ r.content }}[/result]{% endif %}{% endfor %}{% endif %}"
    "{{ m.content }}{% if not ns.tool %}<end_of_turn>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.tool %}<start_of_turn>model\n{% endif %}"
)
# A tool may only answer a call, and its header repeats what was called.
CHANNELS = (
    "{% set ns = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to={{ ns.name }}<|channel|>commentary"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|return|>"
    "{% else %}{% set ns.name = none %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('nothing was called') }}{% endif %}"
    "<|start|>{{ ns.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Roles must alternate but for calls and their results; there is no generation prompt.
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[RESULT] {{ m.content }} [/RESULT]"
    "{% elif m.tool_calls %}[CALLS] {{ m.tool_calls | tojson }}</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def call(arguments: Any, name: str = "pay") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chat(arguments: Any) -> list[dict[str, Any]]:
    return [
        message("user", "Pay Ann."),
        message("assistant", "", tool_calls=[call(arguments)]),
        message("tool", "paid"),
        message("assistant", "Done."),
    ]


def written(template: str, *messages: dict[str, Any], ends: tuple[int, ...] = ()) -> list[str]:
    return stretches(TOKENIZER, ChatEncoder(TOKENIZER, template, {}, ends).encode(Chat(list(messages))))


@pytest.mark.parametrize("arguments", ['{"to": "Ann"}', {"to": "Ann"}], ids=["on the wire", "decoded"])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (MAPPING, "<call pay>to=Ann<|im_end|>"),
        (ENCODING, '<call pay>{"to": "Ann"}<|im_end|>'),
        (JOINING, '<call pay>{"to": "Ann"}<|im_end|>'),
    ],
    ids=["mapping", "encoding", "joining"],
)
def test_the_arguments_of_a_call_are_rendered_as_served_however_the_record_holds_them(
    template: str, said: str, arguments: Any
) -> None:
    assert written(template, *chat(arguments)) == [said, "Done.<|im_end|>"]


def test_text_that_is_no_mapping_is_left_as_it_is() -> None:
    assert written(ENCODING, *chat("[1")) == ['<call pay>"[1"<|im_end|>', "Done.<|im_end|>"]
    assert written(MAPPING, *chat(""))[0] == "<call pay><|im_end|>"


def test_a_prompt_with_calls_before_it_is_rendered_alike() -> None:
    ids = [prompt_tokens(TOKENIZER, chat(form)[:3], (), MAPPING, {}) for form in ('{"to": "Ann"}', {"to": "Ann"})]
    assert ids[0] == ids[1]
    assert "to=Ann" in TOKENIZER.decode(ids[0])


def test_tools_are_read_from_json_text_too() -> None:
    tools = [{"type": "function", "function": {"name": "pay"}}]
    for form in (tools, json.dumps(tools), [json.dumps(tool) for tool in tools]):
        record = parse("here", {"messages": [message("user", "x")], "tools": form})
        assert isinstance(record, Chat)
        assert record.tools == tools
    for nothing in (None, "", "null", "[]", [], {}):
        assert parse("here", {"messages": [message("user", "x")], "tools": nothing}) == Chat([message("user", "x")])


def test_keys_that_parquet_filled_with_null_are_taken_out_at_every_depth() -> None:
    filled = {
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a", "url": None}],
                "tool_calls": [call({"to": "Ann", "sum": None}) | {"id": None}],
            }
        ],
        "tools": [{"function": {"name": "pay", "parameters": {"to": {"kind": "text", "of": None}, "sum": None}}}],
    }
    assert parse("here", filled) == Chat(
        [message("assistant", "a", tool_calls=[call({"to": "Ann"})])],
        [{"function": {"name": "pay", "parameters": {"to": {"kind": "text"}}}}],
    )


def test_null_in_arguments_on_the_wire_was_written_and_stays() -> None:
    record = parse("here", {"messages": [message("assistant", "", tool_calls=[call('{"to": null}')])]})
    assert isinstance(record, Chat)
    assert written(ENCODING, message("user", "x"), *record.messages) == ['<call pay>{"to": null}<|im_end|>']


def test_a_result_inside_the_assistants_turn_is_not_supervised() -> None:
    for said in (message("assistant", ""), message("assistant", "Wait.")):
        calling = said | {"tool_calls": [call({"to": "Ann"})]}
        conversation = (chat("")[0], calling, *chat("")[2:], message("user", "Thanks."), message("assistant", "Bye."))
        found = "".join(written(INSIDE, *conversation))
        assert "paid" not in found
        assert "result" not in found
        assert '[call]pay{"to": "Ann"}[/call]' in found
        assert found.endswith("Done.<end_of_turn>Bye.<end_of_turn>")


def test_a_call_is_supervised_where_its_result_may_not_stand_without_it() -> None:
    assert written(CHANNELS, *chat({"to": "Ann"}), message("user", "Thanks."), message("assistant", "Bye.")) == [
        ' to=pay<|channel|>commentary<|message|>{"to": "Ann"}<|return|>',
        "<|channel|>final<|message|>Done.<|end|>",
        "<|channel|>final<|message|>Bye.<|return|>",
    ]
    thinking = chat({"to": "Ann"})
    thinking[1]["content"] = "Hm."
    assert written(CHANNELS, *thinking)[0] == (
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=pay<|channel|>commentary<|message|>{"to": "Ann"}'
        "<|return|>"
    )


def test_a_call_is_supervised_whole_where_roles_must_alternate() -> None:
    found = written(ALTERNATING, *chat({"to": "Ann"}))
    assert found == [f"[CALLS] {json.dumps([call({'to': 'Ann'})])}</s>", " Done.</s>"]


def test_calls_of_ordinary_templates_end_with_their_turn() -> None:
    assert written(chatting.REASONING, *chat({})[:1], message("assistant", "", tool_calls=[{"name": "clock"}]))[
        -1
    ].endswith("<tool_call>clock</tool_call><|im_end|>")


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Questions, calls (several in a row, with words or without) with their results, and answers; each word once."""
    messages: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(1, 3))):
        messages.append(message("user", f"question{turn}"))
        for step in range(draw(st.integers(0, 2))):
            words = draw(st.sampled_from(["", f"words{turn}{step}"]))
            messages.append(message("assistant", words, tool_calls=[call({"to": f"argument{turn}{step}"})]))
            messages.append(message("tool", f"result{turn}{step}"))
        messages.append(message("assistant", f"answer{turn}"))
    return messages


@given(conversations(), st.sampled_from([MAPPING, ENCODING, JOINING, INSIDE, CHANNELS, ALTERNATING]))
@settings(max_examples=80, deadline=None)
def test_of_any_conversation_all_that_the_assistant_wrote_is_supervised_and_nothing_else(
    messages: list[dict[str, Any]], template: str
) -> None:
    found = "".join(written(template, *messages))
    assert "question" not in found
    assert "result" not in found
    for said in messages:
        if said["role"] == "assistant":
            shown = said["content"] if template is not ALTERNATING or "tool_calls" not in said else ""
            assert shown in found
            for made in said.get("tool_calls", ()):
                assert made["function"]["arguments"]["to"] in found
                assert found.count(made["function"]["arguments"]["to"]) == 1
