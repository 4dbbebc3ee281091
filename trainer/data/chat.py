"""Which tokens of a chat did the assistant write?

Where the chat template marks them (`{% generation %}`), the template is believed. Elsewhere the template is asked by
experiment: the conversation is rendered once as it is and once with the assistant's turn replaced by a character that
occurs nowhere else. What differs between the two is what the template made of the turn, wherever it put it, trimmed it
or moved its reasoning; a sentence about a template's inner workings is never needed. The span then grows on both
sides to what the model writes itself: back to the end of the generation prompt (so that `<think>` belongs to it) and
forward over the special token that ends the turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.config.sections import DataConfig
from trainer.data.documents import Bool, DataError, Int32
from trainer.data.sources import Chat

_STAND_IN = "\ue0f0"
"""A private-use character; a conversation that holds it cannot be told apart and is left out"""

_GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")


class RefusedChatError(Exception):
    """The chat template cannot render a conversation."""


def read_template(data: DataConfig) -> str | None:
    """The chat template of a config; None: the tokenizer's own.

    Raises:
        DataError: the file cannot be read.
    """
    if data.chat_template is None:
        return None
    try:
        return data.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(f"data.chat_template {data.chat_template} cannot be read: {reason}") from error


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    template: str | None,
    variables: Mapping[str, Any],
    **options: Any,
) -> Any:
    """What the tokenizer's `apply_chat_template` returns with `options`.

    Raises:
        RefusedChatError: the template cannot render the conversation.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools or ()) or None, chat_template=template, **options, **variables
        )
    except Exception as error:  # templates are programs: they raise what they like
        raise RefusedChatError(str(error).split("\n")[0]) from error


class ChatEncoder:
    """Renders and tokenises chats and marks the assistant's tokens."""

    def __init__(self, tokenizer: Any, template: str | None, variables: dict[str, Any]) -> None:
        """Prepare for one tokenizer and template (None: the tokenizer's).

        Raises:
            DataError: there is no template, the tokenizer cannot tell where its tokens come from, or the template does
                not show what the assistant wrote.
        """
        if not tokenizer.is_fast:
            raise DataError(
                "the target's tokenizer does not say which characters its tokens come from; "
                "give records of input_ids and loss_mask instead of chats"
            )
        if template is None and not tokenizer.chat_template:
            raise DataError("the target's tokenizer has no chat template; name one in data.chat_template")
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables
        self._marked = _GENERATION_TAG.search(tokenizer.get_chat_template(template)) is not None
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special, key=len, reverse=True)
        self._turn_end = re.compile(r"\s*(?:" + "|".join(map(re.escape, longest_first)) + ")") if special else None
        self._prompt = self._generation_prompt()
        self._check()

    def encode(self, chat: Chat) -> tuple[Int32, Bool, bool]:
        """Token ids, supervision, and whether an assistant turn with text left no trace in them.

        Raises:
            RefusedChatError: the template cannot render this conversation.
        """
        if self._marked:
            return self._encode_marked(chat)
        text = self._render(chat.messages, chat.tools)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], np.int32)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]], np.int64)
        supervised = np.zeros(len(ids), np.bool_)
        untellable = False
        floor = 0
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            span = self._span(text, chat, number, floor)
            if span is None or span[0] == span[1]:
                untellable |= _says_something(message)
                continue
            # A token belongs to the turn if it begins there: one that begins before it, the model was given.
            supervised[np.searchsorted(starts, span[0]) : np.searchsorted(starts, span[1])] = True
            floor = span[1]
        return ids, supervised, untellable

    def _encode_marked(self, chat: Chat) -> tuple[Int32, Bool, bool]:
        encoded = self._apply(chat.messages, chat.tools, return_dict=True, return_assistant_tokens_mask=True)
        supervised = np.asarray(encoded["assistant_masks"], np.bool_)
        says_something = any(message["role"] == "assistant" and _says_something(message) for message in chat.messages)
        return np.asarray(encoded["input_ids"], np.int32), supervised, says_something and not supervised.any()

    def _span(self, text: str, chat: Chat, number: int, floor: int) -> tuple[int, int] | None:
        """Characters of `text` that the assistant wrote in message `number`; None when the template hides the turn."""
        changed = self._changed(text, chat, number)
        if changed is None:
            return None
        start, end = changed
        if self._prompt and not text.endswith(self._prompt, floor, start):
            # Something stands between the generation prompt and the turn: opened reasoning, perhaps. It is the
            # assistant's only if the prompt belongs to this turn, so it must lie behind the message before.
            before = self._changed(text, chat, number - 1) if number else None
            prompt = text.rfind(self._prompt, max(floor, before[1] if before else 0), start)
            if prompt >= 0:
                start = prompt + len(self._prompt)
        ending = self._turn_end.match(text, end) if self._turn_end else None
        return start, ending.end() if ending else end

    def _changed(self, text: str, chat: Chat, number: int) -> tuple[int, int] | None:
        """Characters of `text` that a message is responsible for."""
        messages = list(chat.messages)
        messages[number] = {"role": messages[number]["role"], "content": _STAND_IN}
        try:
            other = self._render(messages, chat.tools)
        except RefusedChatError:
            return None
        if _STAND_IN in text or other.count(_STAND_IN) != 1:
            return None
        # Nothing equals the stand-in, so the common beginning and end cannot reach into the turn.
        most = min(len(text), len(other))
        start = _common_prefix(text, other, most)
        end = _common_prefix(text[::-1], other[::-1], most - start)
        return start, len(text) - end

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt))

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> Any:
        return apply_template(self._tokenizer, messages, tools, self._template, self._variables, **options)

    def _generation_prompt(self) -> str:
        """What the template puts before the assistant's answer when it is asked for one."""
        question = [{"role": "user", "content": "?"}]
        try:
            without, with_prompt = self._render(question), self._render(question, prompt=True)
        except RefusedChatError:
            return ""
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""

    def _check(self) -> None:
        """Refuse a template under which nothing, or not the answer, would be supervised."""
        question, answer = "What is the capital of Peru?", "The capital of Peru is Lima."
        chat = Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
        try:
            ids, supervised, _ = self.encode(chat)
        except RefusedChatError as error:
            raise DataError(f"the chat template does not render a question and its answer: {error}") from error
        written = self._tokenizer.decode(ids[supervised].tolist(), clean_up_tokenization_spaces=False)
        if answer not in written or question in written:
            raise DataError(
                "the chat template does not show which tokens the assistant wrote: of a question and its answer "
                f"{written!r} would be supervised; name another template in data.chat_template, or give records of "
                "input_ids and loss_mask"
            )


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip()) or len(message) > 2


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
