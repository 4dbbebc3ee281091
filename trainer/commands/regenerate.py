"""Lets the target answer prompts and writes training documents of the answers (`python -m trainer regenerate`).

A drafter learns to foresee its target, so it is trained on what the target itself says. Each record of the output
holds the messages, for people, and the token ids exactly as they were read and written, for training: rendering the
text again need not give the same tokens.

The output grows line by line and can be continued: what is in it already is not written again. Beside it stands its
recipe, so that answers of other settings never mix into it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from trainer.config.load import load
from trainer.config.sections import RunConfig
from trainer.data.documents import DataError
from trainer.data.progress import progress
from trainer.data.prompts import Prompt, prompt_tokens, read_prompts
from trainer.data.templates import RefusedChatError, read_template
from trainer.devices import find_device
from trainer.inputs import require_prompts, require_target
from trainer.pretrained import TargetError, load_model, load_model_config, load_tokenizer, stop_tokens
from trainer.target.continuation import refuse_wrong_answers
from trainer.target.positions import learned_positions
from trainer.wording import count

_log = logging.getLogger(__name__)

PULSE_SECONDS = 20.0  # between words of life while a batch is answered


@dataclass(frozen=True)
class AnswerSampling:
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
    turn: int = 0
    """Turns of the prompt that are in `said`"""
    said: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    """Messages in `said` up to the last answer"""
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> bool:
        """Take up what is given before the next answer; False when there is nothing more to answer."""
        if self.turn == len(self.prompt.turns):
            return False
        self.said += self.prompt.turns[self.turn]
        self.turn += 1
        return True

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
        self.answered = len(self.said)

    def lines(self) -> bytes:
        """Records of the finished conversation."""
        self._close()
        for number, document in enumerate(self.documents, 1):
            document["part"] = [number, len(self.documents)]
        return b"".join(json.dumps(document, ensure_ascii=False).encode() + b"\n" for document in self.documents)

    def _close(self) -> None:
        if any(self.mask):
            messages = self.said[: self.answered]
            self.documents.append(
                {"id": self.prompt.id, "messages": messages, "input_ids": self.ids, "loss_mask": self.mask}
            )


class _Output:
    """The growing file, held by one process at a time; opening it drops what a killed one left half written."""

    def __init__(self, path: Path, recipe: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_recipe(path, recipe)
        self.done: set[str] = set()
        """Prompts whose answers are in the file"""
        self._file: BinaryIO = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{path} is being written by another process") from None
        self._file.truncate(self._read(path))

    def _read(self, path: Path) -> int:
        """Note what is there; returns where the last whole conversation ends."""
        whole = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                record = json.loads(line if line.endswith(b"\n") else b"")
                part, parts = record["part"]
                if part == parts:
                    self.done.add(record["id"])
                    whole = self._file.tell()
            except (ValueError, KeyError, TypeError):
                if self._file.read(1):
                    raise DataError(f"{path} line {number} is damaged: delete it, and what follows it") from None
        return whole

    def append(self, lines: bytes) -> None:
        """Write a conversation's records; they survive the death of this process."""
        self._file.write(lines)
        self._file.flush()

    def close(self) -> None:
        """Make the file survive the death of the machine."""
        os.fsync(self._file.fileno())
        self._file.close()


def _check_recipe(path: Path, recipe: dict[str, Any]) -> None:
    """Note the recipe beside a new output; refuse to add to one of another recipe, or to somebody else's file."""
    note = path.with_name(path.name + ".recipe.json")
    if note.exists():
        old = json.loads(note.read_text(encoding="utf-8"))
        changed = sorted(name for name in old.keys() | recipe.keys() if old.get(name) != recipe.get(name))
        if changed:
            raise DataError(f"{path} was written with another {', '.join(changed)}; choose another --output")
    elif path.exists() and path.stat().st_size:
        raise DataError(f"{path} holds something that this command did not write; choose another --output")
    else:
        unfinished = note.with_name(f".{note.name}.unfinished")
        unfinished.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(note)


def regenerate(
    config: RunConfig,
    sources: Sequence[str],
    output: Path,
    sampling: AnswerSampling,
    *,
    batch_size: int,
    limit: int | None,
) -> int:
    """Answer the prompts of `sources` into `output`; returns the number of conversations written by this call.

    Raises:
        DataError, DeviceError, InputError, TargetError: prompts, device or target cannot be used, or `output` belongs
            to other settings.
    """
    device = find_device(config.pipeline.targets[0])
    _refuse_long_texts(config, sampling)
    tokenizer = load_tokenizer(config.target)
    template, variables = read_template(config.data), config.data.chat_template_kwargs
    recipe = {
        "target": config.target.path,
        "gguf_file": config.target.gguf_file,
        "dtype": config.target.dtype,
        "chat_template": template,
        "chat_template_kwargs": variables,
        **vars(sampling),
    }
    prompts = {prompt.id: prompt for source in sources for prompt in read_prompts(source)}
    wanted = list(prompts.values())[:limit]
    file = _Output(output, recipe)
    open_prompts = [prompt for prompt in wanted if prompt.id not in file.done]
    _log.info("%s, %d answered already", count(len(wanted), "prompt"), len(wanted) - len(open_prompts))
    if not open_prompts:
        file.close()
        return 0
    refused: list[str] = []
    too_long = written = 0

    def tokens(conversation: _Conversation) -> list[int] | None:
        """What the target reads before it answers; None when the chat template, or the length, forbids it."""
        nonlocal too_long
        nothing_said = conversation.answered == 0
        try:
            ids = prompt_tokens(tokenizer, conversation.said, conversation.prompt.tools, template, variables)
        except RefusedChatError as error:
            if nothing_said:
                refused.append(str(error))
            return None
        if len(ids) <= sampling.max_prompt_tokens:
            return ids
        too_long += nothing_said
        return None

    waiting: list[tuple[list[int], _Conversation]] = []
    with progress("answering", len(open_prompts)) as advance:
        for prompt in open_prompts:
            conversation = _Conversation(prompt)
            conversation.listen()
            if (ids := tokens(conversation)) is not None:
                waiting.append((ids, conversation))
            else:
                advance(1)
        # Long prompts first: memory runs out at once or never, and neighbours need little padding.
        waiting.sort(key=lambda pair: (-len(pair[0]), pair[1].prompt.id))
        model = load_model(config.target, device)
        refuse_wrong_answers(model, batch_size)
        writer = _Writer(model, tokenizer, device, sampling)
        while waiting:
            batch, waiting = waiting[:batch_size], waiting[batch_size:]
            further: list[tuple[list[int], _Conversation]] = []
            for (ids, conversation), (answer, text, complete) in zip(batch, writer.answer(batch), strict=True):
                conversation.read(ids)
                conversation.write(answer, text)
                goes_on = complete and conversation.listen()
                if goes_on and (more := tokens(conversation)) is not None:
                    further.append((more, conversation))
                    continue
                file.append(conversation.lines())
                written += 1
                advance(1)
            waiting = further + waiting
    file.close()
    if too_long:
        _log.warning("left out: %s of more than %d tokens", count(too_long, "prompt"), sampling.max_prompt_tokens)
    if refused:
        _log.warning("the chat template refused %s, the first because %s", count(len(refused), "prompt"), refused[0])
    return written


def _refuse_long_texts(config: RunConfig, sampling: AnswerSampling) -> None:
    """Raise TargetError where the longest text that is allowed has no place in the target."""
    longest = sampling.max_prompt_tokens + sampling.max_new_tokens
    positions = learned_positions(load_model_config(config.target))
    if positions is not None and longest > positions:
        raise TargetError(
            f"the target has learned {positions} positions: --max-prompt-tokens and --max-new-tokens, which now allow "
            f"texts of {longest} tokens, may add up to that"
        )


class _Pulse(StoppingCriteria):
    """Says now and then how far the answers under way are, for a batch can take many minutes. Stops nothing."""

    def __init__(self) -> None:
        self._spoken = time.monotonic()
        self.prompt_tokens = self.written = 0
        """Tokens before each answer of the batch, and of all earlier answers"""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if time.monotonic() - self._spoken >= PULSE_SECONDS:
            self._spoken = time.monotonic()
            _log.info(
                "%s under way, the longest at %s; %s written before",
                count(len(input_ids), "answer"),
                count(input_ids.shape[1] - self.prompt_tokens, "token"),
                count(self.written, "token"),
            )
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _Writer:
    """The target as an author."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device, sampling: AnswerSampling) -> None:
        self._model, self._tokenizer, self._device, self._sampling = model, tokenizer, device, sampling
        self._ends = stop_tokens(model, tokenizer)
        self._pulse = _Pulse()
        self._padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # masked: any id will do

    def answer(self, batch: list[tuple[list[int], _Conversation]]) -> Iterator[tuple[list[int], str, bool]]:
        """For each prompt: the answer's tokens with the one that ends it, its text, and whether it came to an end."""
        longest = max(len(ids) for ids, _ in batch)
        padded = [[self._padding] * (longest - len(ids)) + ids for ids, _ in batch]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch]
        # Every batch has a seed of its own, so that a continued run does not repeat the draws of the first.
        torch.manual_seed(int(batch[0][1].prompt.id, 16) % 2**32 + self._sampling.seed)
        self._pulse.prompt_tokens = longest
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=self._sampling.max_new_tokens,
                pad_token_id=self._padding,
                stopping_criteria=StoppingCriteriaList([self._pulse]),
                **self._sampling.generate_options(),
            )
        for row in output[:, longest:].tolist():
            end = next((place for place, token in enumerate(row) if token in self._ends), None)
            text = self._tokenizer.decode(row[:end], skip_special_tokens=True)
            answer = row if end is None else row[: end + 1]
            self._pulse.written += len(answer)
            yield answer, text, end is not None


def main(options: argparse.Namespace) -> int:
    """Run `python -m trainer regenerate`; returns the exit code."""
    sampling = AnswerSampling(
        options.temperature,
        options.top_p,
        options.top_k,
        options.max_new_tokens,
        options.max_prompt_tokens,
        options.seed,
    )
    config = load(options.config, options.set)
    require_target(config.target)
    require_prompts(options.prompts)
    written = regenerate(
        config, options.prompts, options.output, sampling, batch_size=options.batch_size, limit=options.limit
    )
    _log.info("%s written to %s", count(written, "conversation"), options.output)
    return 0
