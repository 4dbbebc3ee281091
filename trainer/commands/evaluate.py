"""Measures how far a drafter is accepted and how much it speeds its target up (`python -m trainer evaluate DRAFTER`).

Every prompt is answered twice, by the target alone and with the drafter's help, by real decoding. At temperature 0 the
two texts are compared: in float32 they must be identical; in half precision a target's own rounding may part them.

The acceptance length of a prompt set is the official benchmark's: the mean over answers of the mean over the target's
passes of the tokens that a pass yields, the target's own one included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Column, Table

from trainer.commands.evaluation_journal import Answered, Journal
from trainer.commands.long_prompts import refuse_long_prompts
from trainer.config.sections import DataConfig, TargetConfig
from trainer.data.progress import progress
from trainer.data.prompts import Prompt, prompt_tokens, read_prompts
from trainer.data.templates import RefusedChatError, read_template
from trainer.devices import find_device
from trainer.drafter.decoding import Generation, Limits, Sampling, SpeculativeDecoder
from trainer.drafter.model import DFlashDrafter
from trainer.drafter.released import fingerprint, read_drafter
from trainer.inputs import HUMAN_EVAL, PACKAGES, require_prompts, require_target
from trainer.pretrained import load_model, load_model_config, load_tokenizer, stop_tokens
from trainer.run.checkpoint import find_drafter
from trainer.target.continuation import refuse_wrong_blocks
from trainer.wording import count, finite

_log = logging.getLogger(__name__)


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
    refused: int = 0
    """Prompts that the chat template refused, or a later turn of them."""


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
    journal: Journal | None = None,
    number: int = 0,
) -> SetResult:
    """Answer every turn of every prompt with and without the drafter, and sum up.

    Prompts are rendered by the chat `template` (None: the tokenizer's) with `variables`. Those that are in the journal
    under the set's `number` are not answered again. Raises EvaluationError when the template refuses all of them.
    """
    journal = journal or Journal(None, {})
    examiner = _Examiner(
        decoder,
        tokenizer,
        limits=limits,
        sampling=sampling,
        block_size=block_size,
        seed=seed,
        template=template,
        variables=variables or {},
    )
    answered: list[Answered] = []
    with progress(f"answering {name}", len(prompts)) as advance:
        for place, prompt in enumerate(prompts):
            known = journal.found.get((number, place))
            if known is None:
                known = examiner.answer(prompt)
                journal.write(number, place, known)
            answered.append(known)
            advance(1)
    refusals = [each.refused for each in answered if each.refused]
    if refusals:
        _log.warning("the chat template refused %s, the first because %s", count(len(refusals), "prompt"), refusals[0])
    pairs = [pair for each in answered for pair in each.pairs]
    if not pairs:
        raise EvaluationError(f"the chat template refused every prompt of {name}, the first because {refusals[0]}")
    return replace(set_result(name, pairs, greedy=sampling.temperature == 0), refused=len(refusals))


class _Examiner:
    """Lets the target answer prompts alone and with the drafter's help."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: Any,
        *,
        limits: Limits,
        sampling: Sampling,
        block_size: int,
        seed: int,
        template: str | None,
        variables: Mapping[str, Any],
    ) -> None:
        self._decoder, self._tokenizer = decoder, tokenizer
        self._limits, self._sampling, self._block_size, self._seed = limits, sampling, block_size, seed
        self._template, self._variables = template, variables
        self._generator = torch.Generator(decoder.device)
        self._warm = False

    def answer(self, prompt: Prompt) -> Answered:
        """Every turn of a prompt, up to one that the chat template refuses."""
        # Each prompt has a seed of its own: an evaluation that goes on draws as one that was never interrupted.
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {prompt.id}".encode()).digest()[:7])
        pairs: list[tuple[Generation, Generation]] = []
        messages: list[dict[str, Any]] = []
        self._generator.manual_seed(seed)
        for given in prompt.turns:
            messages += given
            try:
                ids = prompt_tokens(self._tokenizer, messages, prompt.tools, self._template, self._variables)
            except RefusedChatError as error:
                return Answered(pairs, str(error))
            if not self._warm:  # the first pass on a device pays for kernels and allocations; it must not be timed
                self._both(ids, Limits(min(8, self._limits.max_new_tokens)))
                self._generator.manual_seed(seed)
                self._warm = True
            pairs.append(self._both(ids, self._limits))
            answer = self._tokenizer.decode(pairs[-1][1].tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
        return Answered(pairs)

    def _both(self, ids: list[int], limits: Limits) -> tuple[Generation, Generation]:
        alone = self._decoder.plain(ids, limits, self._sampling, self._generator)
        helped = self._decoder.speculative(ids, limits, self._sampling, self._generator, self._block_size)
        return alone, helped


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
    tokenizer = load_tokenizer(target_config)
    refuse_long_prompts(load_model_config(target_config), tokenizer, sets, options.max_new_tokens, template, variables)
    settings = _settings(options, folder, target_config, device, block_size, sampling, variables)
    hidden = {"gguf_file": target_config.gguf_file, "template": template}
    asked = [[name, [prompt.id for prompt in prompts]] for name, prompts in sets]
    journal = Journal(options.output, settings | hidden | {"sets": asked})
    if journal.found:
        _log.info("%s answered already", count(len(journal.found), "prompt"))
    console.print(f"drafter {folder}\ntarget  {target_config.path} ({target_config.dtype}, {device})", soft_wrap=True)
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
            journal=journal,
            number=number,
        )
        for number, (name, prompts) in enumerate(sets)
    ]
    Console().print(table(results))
    if options.output is not None:
        document = settings | {"sets": [asdict(result) for result in results]}
        options.output.write_text(json.dumps(finite(document), indent=2) + "\n", encoding="utf-8")
        journal.finish()
        console.print(f"written to {options.output}", soft_wrap=True)
    differing = sum(r.answers - r.identical for r in results if r.identical is not None)
    if differing and target_config.dtype == "float32":
        _log.error(
            "%s differ from the target's own, which greedy answers in float32 must not: these figures do not count",
            count(differing, "answer"),
        )
        return 1
    return 0


def _settings(
    options: argparse.Namespace,
    folder: Path,
    target: TargetConfig,
    device: torch.device,
    block_size: int,
    sampling: Sampling,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """What is measured and how, as the output says it."""
    return {
        "drafter": str(folder),
        "weights_sha256": fingerprint(folder),
        "target": target.path,
        "dtype": target.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "block_size": block_size,
        "max_new_tokens": options.max_new_tokens,
        "sampling": asdict(sampling),
        "seed": options.seed,
        "chat_template_kwargs": variables,
    }


def _decoder(
    config: TargetConfig, drafter: DFlashDrafter, device: torch.device, tokenizer: Any
) -> tuple[SpeculativeDecoder, frozenset[int]]:
    model = load_model(config, device)
    decoder = SpeculativeDecoder(model, drafter.to(device, getattr(torch, config.dtype)))
    refuse_wrong_blocks(model)
    return decoder, stop_tokens(model, tokenizer)


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
