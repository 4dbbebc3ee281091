"""What is written in a source file? JSONL or Parquet records of chats, raw text or token ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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

_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names for the roles"""


def read_fields(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of a file with where they stand ("train.jsonl line 7"); JSONL may be gzipped, blank lines are skipped.

    Raises:
        DataError: no such file, an unknown kind of file, or a damaged record.
    """
    if not path.is_file():
        raise DataError(f"source {path} does not exist")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _read_jsonl(path)
    else:
        raise DataError(f"source {path} must end in .jsonl, .jsonl.gz or .parquet")


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path.name} line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise DataError(f"{where} must be an object, not {type(fields).__name__}")
            yield where, fields


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        number = 0
        for batch in ParquetFile(path).iter_batches(1024):
            for fields in batch.to_pylist():
                number += 1
                yield f"{path.name} row {number}", fields
    except ArrowInvalid as error:
        raise DataError(f"{path} is not Parquet: {error}") from error


def parse(where: str, fields: dict[str, Any]) -> Record:
    """The record in `fields`; token ids win over chats, chats over text.

    Raises:
        DataError: none of these is there, or it has the wrong shape.
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
    if mask is None or len(mask) != len(ids):
        raise DataError(f"{where} needs a loss_mask as long as its input_ids")
    return Tokens([int(token) for token in ids], [bool(flag) for flag in mask])


def _parse_chat(where: str, messages: Any, tools: Any) -> Chat:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: a chat must be a list of messages")
    return Chat([_parse_message(where, message) for message in messages], tools or None)


def _parse_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise DataError(f"{where}: a message needs a role (or from)")
    # Parquet spells out the fields that a message lacks as null; templates ask whether a field is there.
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "from", "content", "value") and value is not None
    }
    content = message.get("content", message.get("value"))
    return {"role": _ROLES.get(role, role), "content": _plain(where, content), **rest}


def _plain(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: the content of a message must be text; images and sounds are not supported")
    return content
