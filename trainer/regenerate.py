"""How do prompts become training documents? The target writes the answers. (`python -m trainer regenerate`)

A drafter learns to foresee its target, so it is trained on what the target itself says. Each record of the output
holds the messages, for people, and the token ids exactly as they were read and written, for training: rendering the
text again need not give the same tokens.

The output grows line by line and can be continued: what is in it already is not written again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.config import RunConfig, load
from trainer.data.documents import DataError
from trainer.data.progress import progress
from trainer.data.prompts import PACKAGES, Prompt, read_prompts
from trainer.target import load_model, load_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; None leaves a value to the target's generation config, as its authors recommend."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_new_tokens: int
    max_prompt_tokens: int
    seed: int

    def generate_options(self) -> dict[str, Any]:
        """Keywords for transformers' `generate`."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        named = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in named.items() if value is not None}
        return {"do_sample": True, **given} if given else {}


@dataclass
class _Conversation:
    """A prompt that is being answered, turn by turn."""

    prompt: Prompt
    left: list[dict[str, Any]]
    """Given messages that are not yet in `said`"""
    said: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        """Take up the given messages to the next user turn."""
        while self.left:
            self.said.append(self.left.pop(0))
            if self.said[-1]["role"] == "user":
                return

    def read(self, ids: list[int]) -> None:
        """The target was given these tokens; they mostly go on from what was said before."""
        if ids[: len(self.ids)] == self.ids:
            self.mask += [0] * (len(ids) - len(self.ids))
        else:  # templates that shorten earlier answers (dropped reasoning) start a document of their own
            self._close()
            self.mask = [0] * len(ids)
        self.ids = list(ids)

    def write(self, ids: list[int], text: str) -> None:
        """The target wrote these tokens."""
        self.ids += ids
        self.mask += [1] * len(ids)
        self.said.append({"role": "assistant", "content": text})

    def lines(self) -> bytes:
        """Records of the finished conversation."""
        self._close()
        for number, document in enumerate(self.documents, 1):
            document["part"] = [number, len(self.documents)]
        return b"".join(json.dumps(document, ensure_ascii=False).encode() + b"\n" for document in self.documents)

    def _close(self) -> None:
        if any(self.mask):
            self.documents.append(
                {"id": self.prompt.id, "messages": list(self.said), "input_ids": self.ids, "loss_mask": self.mask}
            )


class _Output:
    """The growing file; opening it drops what a killed process left half written."""

    def __init__(self, path: Path, recipe: dict[str, Any]) -> None:
        note = path.with_name(path.name + ".recipe.json")
        if note.exists() and json.loads(note.read_text()) != recipe:
            raise DataError(f"{path} was written with other settings ({note.name}); choose another --output")
        path.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(recipe, indent=1))
        self.done: set[str] = set()
        whole = 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    try:
                        record = json.loads(line) if line.endswith(b"\n") else None
                    except ValueError:
                        record = None
                    if record is None:
                        break
                    if record["part"][0] == record["part"][1]:
                        self.done.add(record["id"])
                        whole = file.tell()
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(whole)

    def append(self, lines: bytes) -> None:
        """Write a conversation's records; they survive the death of this process."""
        self._file.write(lines)
        self._file.flush()

    def close(self) -> None:
        """Make the file survive the death of the machine."""
        os.fsync(self._file.fileno())
        self._file.close()


def regenerate(
    config: RunConfig, sources: Sequence[str], output: Path, sampling: Sampling, *, batch_size: int, limit: int | None
) -> int:
    """Answer the prompts of `sources` into `output`; returns the number of conversations written by this call.

    Raises:
        DataError, TargetError: prompts or target cannot be used, or `output` belongs to other settings.
    """
    tokenizer = load_tokenizer(config.target)
    template = config.data.chat_template.read_text() if config.data.chat_template is not None else None
    variables = config.data.chat_template_kwargs
    recipe = {
        "target": config.target.path,
        "sampling": vars(sampling),
        "chat_template": template,
        "chat_template_kwargs": variables,
    }
    prompts = {prompt.id: prompt for source in sources for prompt in read_prompts(source)}
    wanted = list(prompts.values())[:limit]
    file = _Output(output, recipe)
    open_prompts = [prompt for prompt in wanted if prompt.id not in file.done]
    _log.info("%d prompts, %d answered already", len(wanted), len(wanted) - len(open_prompts))
    if not open_prompts:
        file.close()
        return 0
    device = torch.device(config.pipeline.targets[0])
    writer = _Writer(load_model(config.target, device), tokenizer, device, sampling)

    def render(conversation: _Conversation) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                conversation.said,
                tools=list(conversation.prompt.tools) or None,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=True,
                **variables,
            )["input_ids"]
        )

    too_long = written = 0
    waiting: list[tuple[list[int], _Conversation]] = []
    for prompt in open_prompts:
        conversation = _Conversation(prompt, list(prompt.messages))
        conversation.listen()
        waiting.append((render(conversation), conversation))
    # Long prompts first: memory runs out at once or never, and neighbours need little padding.
    waiting.sort(key=lambda pair: (-len(pair[0]), pair[1].prompt.id))
    with progress("answering", len(open_prompts)) as advance:
        while waiting:
            batch, waiting = waiting[:batch_size], waiting[batch_size:]
            fitting = [pair for pair in batch if len(pair[0]) <= sampling.max_prompt_tokens]
            ended = [conversation for ids, conversation in batch if len(ids) > sampling.max_prompt_tokens]
            further: list[tuple[list[int], _Conversation]] = []
            for (ids, conversation), (answer, text, complete) in zip(fitting, writer.answer(fitting), strict=True):
                conversation.read(ids)
                conversation.write(answer, text)
                if complete and conversation.left:
                    conversation.listen()
                    further.append((render(conversation), conversation))
                else:
                    ended.append(conversation)
            for conversation in ended:
                lines = conversation.lines()
                too_long += not lines
                written += bool(lines)
                file.append(lines)
            advance(len(ended))
            waiting = further + waiting
    file.close()
    if too_long:
        _log.warning("%d prompts are longer than %d tokens and were left out", too_long, sampling.max_prompt_tokens)
    return written


class _Writer:
    """The target as an author."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device, sampling: Sampling) -> None:
        self._model, self._tokenizer, self._device, self._sampling = model, tokenizer, device, sampling
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends if ends is not None else tokenizer.eos_token_id])
        self._padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self._ends)

    def answer(self, batch: list[tuple[list[int], _Conversation]]) -> Iterator[tuple[list[int], str, bool]]:
        """For each prompt: the answer's tokens with the one that ends it, its text, and whether it came to an end."""
        if not batch:
            return
        longest = max(len(ids) for ids, _ in batch)
        padded = [[self._padding] * (longest - len(ids)) + ids for ids, _ in batch]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch]
        # Every batch has a seed of its own, so that a continued run does not repeat the draws of the first.
        torch.manual_seed(int(batch[0][1].prompt.id, 16) % 2**32 + self._sampling.seed)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=self._sampling.max_new_tokens,
                pad_token_id=self._padding,
                **self._sampling.generate_options(),
            )
        for row in output[:, longest:].tolist():
            end = next((place for place, token in enumerate(row) if token in self._ends), None)
            text = self._tokenizer.decode(row[:end], skip_special_tokens=True)
            yield (row if end is None else row[: end + 1]), text, end is not None


def main(arguments: list[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(
        prog="trainer regenerate",
        description="Let a run's target answer prompts. An interrupted command is continued by giving it again.",
    )
    parser.add_argument("config", type=Path, help="the run's YAML file: its target, template and first target device")
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help=f"JSONL or Parquet files with prompt or messages, or {', '.join(PACKAGES)}",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write, a source for data.sources")
    parser.add_argument("--temperature", type=float, help="0: greedy; default: the target's generation config")
    parser.add_argument("--top-p", type=float, help="default: the target's generation config")
    parser.add_argument("--top-k", type=int, help="default: the target's generation config")
    parser.add_argument("--max-new-tokens", type=int, default=2048, help="greatest length of an answer (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=2048, help="longer prompts are left out (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts answered side by side (%(default)s)")
    parser.add_argument("--limit", type=int, help="answer only the first prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (%(default)s)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change the config")
    options = parser.parse_args(arguments)
    sampling = Sampling(
        options.temperature,
        options.top_p,
        options.top_k,
        options.max_new_tokens,
        options.max_prompt_tokens,
        options.seed,
    )
    config = load(options.config, options.set)
    written = regenerate(
        config, options.prompts, options.output, sampling, batch_size=options.batch_size, limit=options.limit
    )
    _log.info("%d conversations written to %s", written, options.output)
    return 0
