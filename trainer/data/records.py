"""Reads what a record says: a chat, raw text, or token ids.

Parquet gives every message and every tool the keys of all others, with null for what was never there. A template asks
whether a key is there, so nulls are taken out at every depth; the same records then give the same tokens from JSONL and
from Parquet. What stands inside a JSON string, such as a call's arguments on the wire, stays as it was written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainer.data.documents import DataError


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as chat templates read it."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Raw text, all of it supervised."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids with their supervision, as `trainer regenerate` writes them."""

    input_ids: list[int]
    loss_mask: list[bool]


Record = Chat | Text | Tokens


class UnsupportedRecordError(Exception):
    """A sound record that cannot be used: its content is more than text."""


_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bot", "model"), "assistant")}
"""Names for the roles in ShareGPT's records"""


def parse(where: str, fields: dict[str, Any]) -> Record:
    """The record in `fields`; token ids win over chats, chats over text.

    Raises:
        DataError: none of these is there, or it has the wrong shape.
        UnsupportedRecordError: a message holds an image or another thing that is not text.
    """
    if fields.get("input_ids") is not None:
        return _parse_tokens(where, fields)
    for name in ("messages", "conversations"):
        if fields.get(name) is not None:
            return _parse_chat(where, fields[name], fields.get("tools"))
    if isinstance(fields.get("text"), str):
        return Text(fields["text"])
    raise DataError(f"{where} has none of input_ids, messages, conversations and text; its keys are {sorted(fields)}")


def _parse_tokens(where: str, fields: dict[str, Any]) -> Tokens:
    ids, mask = fields["input_ids"], fields.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise DataError(f"{where}: input_ids must be a list of integers")
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise DataError(f"{where} needs a loss_mask as long as its input_ids")
    for flag in mask:
        if not isinstance(flag, int) or flag not in (0, 1):
            raise DataError(f"{where}: loss_mask must hold 1 (learned), 0, true or false, not {flag!r}")
    return Tokens(ids, [bool(flag) for flag in mask])


def _parse_chat(where: str, messages: Any, tools: Any) -> Chat:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: a chat must be a list of messages")
    try:
        return Chat([_parse_message(where, message) for message in messages], _parse_tools(where, tools) or None)
    except RecursionError:
        raise DataError(f"{where} is nested too deeply") from None


def _parse_tools(where: str, tools: Any) -> list[Any]:
    """Descriptions of functions: a list, or JSON text of a list or of each, as some data sets hold them."""
    tools = _from_json(where, "tools", tools)
    if not tools:
        return []
    if not isinstance(tools, list):
        raise DataError(f"{where}: tools must be a list")
    tools = [_from_json(where, "tools", tool) for tool in tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: each of the tools must be an object")
    return [without_nulls(tool) for tool in tools]


def _parse_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise DataError(f"{where}: a message needs a role (or from)")
    known = ("role", "from", "content", "value", "tool_calls")
    rest = {key: without_nulls(value) for key, value in message.items() if key not in known and value is not None}
    if calls := _from_json(where, "tool_calls", message.get("tool_calls")):
        rest["tool_calls"] = without_nulls(calls)
    content = message.get("content", message.get("value"))
    return {"role": _ROLES.get(role, role), "content": _plain(where, content), **rest}


def _plain(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise DataError(f"{where}: the content of a message must be text")
    kinds = [part.get("type") or ("text" if "text" in part else "a part without a type") for part in content]
    if others := sorted({str(kind) for kind in kinds if kind != "text"}):
        raise UnsupportedRecordError(f"{where}: the content of a message must be text; it holds {', '.join(others)}")
    return "".join(str(part.get("text") or "") for part in content)


def _from_json(where: str, name: str, value: Any) -> Any:
    """A value, decoded where it is JSON text."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: {name} is text, but not JSON") from None


def without_nulls(value: Any) -> Any:
    """A copy without the keys, at any depth, whose value is null. Nulls in lists stay: nothing fills those in."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
