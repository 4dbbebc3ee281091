"""Renders conversations by a chat template, in the shape that the template takes.

On the wire the arguments of a tool call are JSON text. Serving engines decode them before they render, and most
templates want it so; some want the text. Which of them a template is, only it can say: the decoded form is tried first,
and the other where the template refuses that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.sections import DataConfig
from trainer.data.documents import DataError

_Messages = list[dict[str, Any]]


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


def choose_template(tokenizer: Any, template: str | None, tools: Sequence[Any] | None = None) -> str:
    """The text of the template that renders a conversation with these tools: some tokenizers have one for tools alone.

    Raises:
        DataError: there is none, or several and none of them is the default.
    """
    if template is None and not tokenizer.chat_template:
        raise DataError("the target's tokenizer has no chat template; name one in data.chat_template")
    try:
        return str(tokenizer.get_chat_template(template, list(tools or ()) or None))
    except ValueError:
        raise DataError(
            f"the target's tokenizer has several chat templates ({', '.join(sorted(tokenizer.chat_template))}) and "
            "none of them is called default; write the right one to a file and name that in data.chat_template"
        ) from None


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
        DataError: the tokenizer has no template for this.
        RefusedChatError: the template cannot render the conversation.
    """
    text = choose_template(tokenizer, template, tools)
    refusal: Exception | None = None
    for form in argument_forms(messages):
        try:
            return tokenizer.apply_chat_template(
                form, tools=list(tools or ()) or None, chat_template=text, **options, **variables
            )
        except Exception as error:  # templates are programs: they raise what they like
            refusal = refusal or error
    raise RefusedChatError(str(refusal).split("\n")[0]) from refusal


def argument_forms(messages: Sequence[Mapping[str, Any]]) -> list[_Messages]:
    """The conversation with its calls' arguments decoded and, where that is another, with them as JSON text."""
    decoded, text = _with_arguments(messages, _decoded), _with_arguments(messages, _as_text)
    return [decoded] if decoded == text else [decoded, text]


def _with_arguments(messages: Sequence[Mapping[str, Any]], form: Any) -> _Messages:
    return [
        {**message, "tool_calls": [_call_with(call, form) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _call_with(call: Any, form: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with(call["function"], form)}
    return {**call, "arguments": form(call["arguments"])} if "arguments" in call else call


def _decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
