"""Finds the tokens of a chat that the assistant wrote.

Where the chat template marks them (`{% generation %}`), the template is believed. Elsewhere the template is asked by
experiment: the conversation is rendered once as it is and once with the assistant's turn replaced by a character that
occurs nowhere else. What differs between the two is what the template made of the turn, wherever it put it, trimmed it
or moved its reasoning; a sentence about a template's inner workings is never needed. The span then grows on both
sides to what the model writes itself: back to the end of the generation prompt (so that `<think>` belongs to it) and
forward over the token that ends the turn. What a tool answered is not the assistant's, even inside its turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.data.documents import Bool, DataError, Int32
from trainer.data.ends import ANSWER, QUESTION, SECOND_ANSWER, SECOND_QUESTION, TWO_TURNS, TurnEnds
from trainer.data.marks import Marks
from trainer.data.records import Chat
from trainer.data.templates import RefusedChatError, apply_template, choose_template

_STAND_IN, _ARGUMENT = "\ue0f0", "\ue0f1"
"""Private-use characters; a conversation that holds one cannot be told apart and is left out"""

_SPEAKERS = frozenset({"system", "developer", "user", "assistant"})
"""Whoever else speaks is a tool"""

_THOUGHT = re.compile(r"(?P<before>.*?<think>)?(?P<thought>.*?)(?P<after></think>.*)", re.DOTALL)
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

_Span = tuple[int, int]
_Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as tokens."""

    ids: Int32
    supervised: Bool
    untellable: bool = False
    """An assistant's turn with text left no trace"""
    reasoning_dropped: bool = False
    """The template left out what the assistant thought"""


class ChatEncoder:
    """Renders and tokenises chats and marks the assistant's tokens."""

    def __init__(
        self, tokenizer: Any, template: str | None, variables: dict[str, Any], ends: Iterable[int] = ()
    ) -> None:
        """Prepare for one tokenizer and template (None: the tokenizer's); `ends` are the ids at which the target stops.

        Raises:
            DataError: there is no template, the tokenizer cannot tell where its tokens come from, or the template does
                not show what the assistant wrote.
        """
        if not tokenizer.is_fast:
            raise DataError(
                "the target's tokenizer does not say which characters its tokens come from; "
                "give records of input_ids and loss_mask instead of chats"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables
        self._ends = tuple(ends)
        self._readers = {text: self._reader(text) for text in [choose_template(tokenizer, template)]}
        self._check()

    def encode(self, chat: Chat) -> EncodedChat:
        """Token ids and supervision of a conversation.

        Raises:
            RefusedChatError: the template cannot render this conversation.
        """
        template = choose_template(self._tokenizer, self._template, chat.tools)
        if template not in self._readers:
            self._readers[template] = self._reader(template)
        reader = self._readers[template]
        text = reader.render(chat.messages, chat.tools)
        spans, untellable = reader.spans(text, chat)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        supervised = np.zeros(len(offsets), np.bool_)
        for start, end in spans:
            # A token that merges template and answer is the assistant's: it chose it for what it begins to say.
            supervised |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
        ids = np.asarray(encoded["input_ids"], np.int32)
        return EncodedChat(ids, supervised, untellable, reader.drops_reasoning(chat))

    def _reader(self, template: str) -> _Reader:
        return _Reader(self._tokenizer, template, self._variables, self._ends)

    def _check(self) -> None:
        """Refuse a template under which nothing, or not the answers, would be supervised."""
        answers = [ANSWER, SECOND_ANSWER]
        try:
            encoded = self.encode(Chat(TWO_TURNS))
        except RefusedChatError:
            answers = [ANSWER]
            try:
                encoded = self.encode(Chat(TWO_TURNS[:2]))
            except RefusedChatError as error:
                raise DataError(f"the chat template does not render a question and its answer: {error}") from error
        written = self._tokenizer.decode(encoded.ids[encoded.supervised].tolist(), clean_up_tokenization_spaces=False)
        cure = "name another template in data.chat_template, or give records of input_ids and loss_mask"
        if QUESTION in written or SECOND_QUESTION in written:
            raise DataError(
                "the chat template does not show which tokens the assistant wrote: what it marks holds a question of "
                f"the user, {written!r}; {cure}"
            )
        if not all(answer in written for answer in answers):
            raise DataError(
                "the chat template does not show which tokens the assistant wrote: of questions and their answers "
                f"{written!r} would be supervised; {cure}"
            )


class _Reader:
    """Finds the assistant's characters in what one template renders."""

    def __init__(self, tokenizer: Any, template: str, variables: dict[str, Any], ends: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables
        self._prompt = self._generation_prompt()
        self._turn_ends = TurnEnds(tokenizer, ends, self._try_render, self._prompt)
        self._marks = Marks.of(template)
        self._openers = self._find_openers() if self._marks is not None else []

    def spans(self, text: str, chat: Chat) -> tuple[list[_Span], bool]:
        """The assistant's characters, and whether a turn of the assistant's left no trace in the text."""
        if self._marks is not None:
            marked = self._apply(self._marks.template, chat.messages, chat.tools)
            found = self._marks.spans(marked, text, self._openers, self._prompts(text, chat))
            if found is not None:
                found = [(start, self._without_blanks_behind_end(text, start, end)) for start, end in found]
                says_something = any(m["role"] == "assistant" and _says_something(m) for m in chat.messages)
                return found, says_something and not found
        spans: list[_Span] = []
        untellable = False
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            said = self._said(text, chat, number, spans[-1][1] if spans else 0)
            untellable |= not said and _says_something(message)
            spans += said
        return spans, untellable

    def drops_reasoning(self, chat: Chat) -> bool:
        """Whether reasoning of the assistant does not appear in the text."""
        replaced = [_with_stand_in_thought(message) for message in chat.messages]
        count = sum(message is not None for message in replaced)
        if not count:
            return False
        other = self._try_render([new or old for new, old in zip(replaced, chat.messages, strict=True)], chat.tools)
        return other is not None and other.count(_STAND_IN) < count

    def render(self, messages: list[_Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The text of a conversation; raises RefusedChatError."""
        return self._apply(self._template, messages, tools, prompt=prompt)

    def _apply(self, template: str, messages: list[_Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": prompt}
        return str(apply_template(self._tokenizer, messages, tools, template, self._variables, **options))

    def _try_render(
        self, messages: list[_Message], tools: list[Any] | None = None, *, prompt: bool = False
    ) -> str | None:
        try:
            return self.render(messages, tools, prompt=prompt)
        except RefusedChatError:
            return None

    def _said(self, text: str, chat: Chat, number: int, floor: int) -> list[_Span]:
        """Characters of `text` that the assistant wrote in message `number`; none when the template hides the turn."""
        message = chat.messages[number]
        whole = self._whole(text, chat, number)
        if not message.get("tool_calls"):
            return self._grown(text, chat, number, whole, floor) if whole is not None else []
        result = self._first_result(text, chat, number)
        if whole is not None and (result is None or result >= whole[1]):
            return self._grown(text, chat, number, whole, floor)
        # The template did not take the turn without its calls, or a result stands inside the turn.
        content = self._changed(text, chat, number, {**message, "content": _STAND_IN}) if message["content"] else None
        calls = self._changed(text, chat, number, _with_stand_in_calls(message))
        parts = [part for part in (whole if whole and calls is None else calls, content) if part is not None]
        first = [part for part in parts if result is None or part[0] < result]
        if not first:
            return []
        hull = min(part[0] for part in first), max(min(part[1], result or part[1]) for part in first)
        start = self._start(text, chat, number, hull, floor, only_calls=True)
        said = [(start, self._end_before_results(text, chat, number, hull[1]))]
        behind = [self._with_end(text, part) for part in parts if part not in first]
        return [span for span in said + behind if span[0] < span[1]]

    def _grown(self, text: str, chat: Chat, number: int, changed: _Span, floor: int) -> list[_Span]:
        """A turn with what the model writes around it; nothing of one whose words the template hides."""
        start = self._start(text, chat, number, changed, floor, only_calls=False)
        if not text[start : changed[1]].strip() and _says_something(chat.messages[number]):
            return []
        span = self._with_end(text, (start, changed[1]))
        return [span] if span[0] < span[1] else []

    def _with_end(self, text: str, span: _Span) -> _Span:
        return span[0], self._turn_ends.match(text, span[1]) or span[1]

    def _start(self, text: str, chat: Chat, number: int, hull: _Span, floor: int, *, only_calls: bool) -> int:
        """Where the generation prompt of message `number` ends, if it can be told; else where the turn differs."""
        start, end = hull
        if self._prompt and not only_calls and text.endswith(self._prompt, floor, start):
            return start
        given = self._try_render(chat.messages[:number], chat.tools, prompt=True) if number else None
        if (
            given is not None
            and text.startswith(given)
            and floor <= len(given) <= end
            # A template without generation prompt may have its opener between the two, which the target never writes.
            and (self._prompt or only_calls or not text[len(given) : start].strip())
        ):
            return len(given)
        if self._prompt and not text.endswith(self._prompt, floor, start):
            # Something stands between the generation prompt and the turn: opened reasoning, perhaps. It is the
            # assistant's only if the prompt belongs to this turn, so it must lie behind the message before.
            before = self._whole(text, chat, number - 1) if number else None
            prompt = text.rfind(self._prompt, max(floor, before[1] if before else 0), start)
            if prompt >= 0:
                return prompt + len(self._prompt)
        return start

    def _without_blanks_behind_end(self, text: str, start: int, end: int) -> int:
        last = self._turn_ends.search(text, start, end)
        return last if last is not None and not text[last:end].strip() else end

    def _first_result(self, text: str, chat: Chat, number: int) -> int | None:
        """Where the first result that answers message `number` begins."""
        for later in range(number + 1, len(chat.messages)):
            if chat.messages[later]["role"] in _SPEAKERS:
                return None
            result = self._changed(text, chat, later, {**chat.messages[later], "content": _STAND_IN})
            if result is not None:
                return result[0]
        return None

    def _end_before_results(self, text: str, chat: Chat, number: int, said: int) -> int:
        """Where a turn ends that says at least what stands before `said`, and in which results may follow."""
        if end := self._turn_ends.match(text, said):
            return end
        alone = self._try_render(chat.messages[: number + 1], chat.tools)
        common = _common_prefix(text, alone, min(len(text), len(alone))) if alone is not None else 0
        if common <= said:
            return said
        return self._turn_ends.search(text, said, common) or max(said, len(text[:common].rstrip()))

    def _whole(self, text: str, chat: Chat, number: int) -> _Span | None:
        return self._changed(text, chat, number, {"role": chat.messages[number]["role"], "content": _STAND_IN})

    def _changed(self, text: str, chat: Chat, number: int, stand_in: _Message) -> _Span | None:
        """Characters of `text` that differ when a stand-in takes the place of a message."""
        messages = list(chat.messages)
        messages[number] = stand_in
        other = self._try_render(messages, chat.tools)
        if other is None or _STAND_IN in text or _ARGUMENT in text:
            return None
        shown = other.count(_STAND_IN)
        # Words in two places cannot be told apart from what stands between; a tool's result may well be repeated.
        repeats = stand_in["role"] not in _SPEAKERS or ("tool_calls" in stand_in and _ARGUMENT in other)
        if not (shown == 1 or (repeats and (shown or _ARGUMENT in other))):
            return None
        # Nothing equals the stand-in, so the common beginning and end cannot reach into the turn.
        most = min(len(text), len(other))
        start = _common_prefix(text, other, most)
        end = _common_prefix(text[::-1], other[::-1], most - start)
        return start, len(text) - end

    def _prompts(self, text: str, chat: Chat) -> list[int]:
        """Where the text that was given before each answer ends, of those answers before which nothing changed."""
        numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant" and number]
        given = (self._try_render(chat.messages[:number], chat.tools, prompt=True) for number in numbers)
        return [len(before) for before in given if before is not None and text.startswith(before)]

    def _find_openers(self) -> list[str]:
        """The generation prompt, and as much of it as stands before an answer without reasoning."""
        asked, answered = self._try_render(TWO_TURNS[:1]), self._try_render(TWO_TURNS[:2])
        if not self._prompt or asked is None or answered is None or not answered.startswith(asked):
            return [self._prompt]
        opening = answered.removeprefix(asked)
        return [
            self._prompt,
            self._prompt[: _common_prefix(opening, self._prompt, min(map(len, (opening, self._prompt))))],
        ]

    def _generation_prompt(self) -> str:
        """What the template puts before the assistant's answer when it is asked for one."""
        question = [{"role": "user", "content": "?"}]
        without, with_prompt = self._try_render(question), self._try_render(question, prompt=True)
        if without is None or with_prompt is None or not with_prompt.startswith(without):
            return ""
        return with_prompt.removeprefix(without)


def _says_something(message: _Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls")) or any(map(message.get, _REASONING_FIELDS))


def _with_stand_in_calls(message: _Message) -> _Message:
    """The message with other arguments of its calls, whose functions stay the same."""
    calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else [message["tool_calls"]]
    return {**message, "tool_calls": [_call_with_stand_in(call) for call in calls]}


def _call_with_stand_in(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_stand_in(call["function"])}
    return {**call, "arguments": {_ARGUMENT: _ARGUMENT}}


def _with_stand_in_thought(message: _Message) -> _Message | None:
    """An assistant's message with other reasoning; None where it has none."""
    if message["role"] != "assistant":
        return None
    fields = [name for name in _REASONING_FIELDS if isinstance(message.get(name), str) and message[name].strip()]
    if fields:
        return {**message, **dict.fromkeys(fields, _STAND_IN)}
    found = _THOUGHT.fullmatch(message["content"])
    if found is None or not found["thought"].strip():
        return None
    return {**message, "content": (found["before"] or "") + _STAND_IN + found["after"]}


def _common_prefix(first: str, second: str, most: int) -> int:
    """Length of the common beginning, at most `most`; by bisection, for slices compare at memory speed."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
