"""What is written in a source file? JSONL or Parquet records of chats, raw text or token ids."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
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
        DataError: no such file, an unknown kind of file, a damaged file, or a damaged record.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        yield from _read_jsonl(path)


def count_records(path: Path) -> int:
    """How many records a file holds, about: blank lines count.

    Raises:
        DataError: as `read_fields`.
    """
    if path.suffix != ".parquet":
        return sum(1 for _ in _lines(path))
    from pyarrow.parquet import read_metadata

    with readable(path):
        return int(read_metadata(path).num_rows)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Tell in one sentence what is wrong with a file that is read inside.

    Raises:
        DataError: it is not there, damaged, or cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"source {path} does not exist") from None
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:  # the first is what pyarrow raises
        raise DataError(f"source {path} is damaged: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise DataError(f"source {path} cannot be read: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[bytes]:
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise DataError(f"source {path} must end in .jsonl, .jsonl.gz or .parquet")
    with readable(path), gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            fields = json.loads(line)
            if b"\\ud" in line.lower():
                json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON may hold it, but no tokenizer and no other file
            raise DataError(f"{where} holds half of a surrogate pair, which is no text") from None
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(f"{where} must be an object, not {type(fields).__name__}")
        yield where, fields


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with readable(path), path.open("rb") as file:
        for batch in ParquetFile(file).iter_batches(1024):
            for fields in batch.to_pylist():
                number += 1
                yield f"{path.name} row {number}", fields


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
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise DataError(f"{where}: input_ids must be a list of integers")
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise DataError(f"{where} needs a loss_mask as long as its input_ids")
    return Tokens(ids, [bool(flag) for flag in mask])


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
        return "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: the content of a message must be text; images and sounds are not supported")
    return content
