"""Proves that training and serving see the same thing (`python -m tests.trainer.overfit`, some 90 s on two cores).

A target writes answers, a drafter learns them by heart, is exported, and the official package decodes the same prompts
with it. Were there an offset in the layers, the positions, the mask or the embedding between training and serving, the
drafter's blocks would be refused, however low its loss: nearly whole blocks are accepted only if both agree in all.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

REPOSITORY = Path(__file__).parents[2]
JUDGE = REPOSITORY / ".cache" / "judge"
TARGET = REPOSITORY / ".cache" / "smollm2"
ENOUGH = 0.9  # share of the block
QUESTIONS = (
    "Explain what a hash table is.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Give me three tips for sleeping well.",
    "Why is the sky blue?",
    "Describe a cat in one paragraph.",
)


@dataclass(frozen=True)
class Lesson:
    """A prompt and what the target answers to it, as token ids."""

    prompt: list[int]
    answer: list[int]


@torch.no_grad()
def write_lessons(model: Any, prompts: list[list[int]], length: int) -> list[Lesson]:
    """What the target greedily writes behind each prompt, `length` tokens; end-of-text tokens end nothing here."""
    lessons = []
    for prompt in prompts:
        answer: list[int] = []
        cache, ids = None, torch.tensor([prompt])
        while len(answer) < length:
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            answer.append(int(ids))
        lessons.append(Lesson(prompt, answer))
    return lessons


def write_run(work: Path, lessons: list[Lesson], sections: dict[str, Any]) -> Path:
    """The lessons as data and the configuration of a run on them; returns the latter's path."""
    source = work / "lessons.jsonl"
    with source.open("w") as file:
        for lesson in lessons:
            mask = [0] * len(lesson.prompt) + [1] * len(lesson.answer)
            file.write(json.dumps({"input_ids": lesson.prompt + lesson.answer, "loss_mask": mask}) + "\n")
    sections["data"] |= {"sources": [str(source)], "epochs": 10_000}
    sections["pipeline"] = {"targets": ["cpu"], "drafters": ["cpu"], "mode": "eager"}
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def judge(model: Any, drafter: Path, lessons: list[Lesson]) -> list[float]:
    """Mean accepted length of each lesson's prompt in the official package, which must write the lesson's answer.

    One token comes from the prompt's pass, then whole blocks: answers of 1 + n * block tokens have no partial block.
    """
    if str(JUDGE) not in sys.path:
        sys.path.append(str(JUDGE))
    official = importlib.import_module("dflash.model")
    official._cuda_time = time.perf_counter  # type: ignore[attr-defined]  # it times with CUDA's clock
    served = official.DFlashDraftModel.from_pretrained(drafter).eval()
    block = int(served.block_size)
    lengths = []
    for lesson in lessons:
        tokens = 1 + (len(lesson.answer) - 1) // block * block
        with torch.no_grad():
            result = official.dflash_generate(
                served,
                target=model,
                input_ids=torch.tensor([lesson.prompt]),
                max_new_tokens=tokens,
                stop_token_ids=None,
                return_stats=True,
            )
        assert result.output_ids[0, len(lesson.prompt) :].tolist() == lesson.answer[:tokens]
        lengths.append(sum(result.acceptance_lengths) / len(result.acceptance_lengths))
    return lengths


def main() -> int:
    """Overfit SmolLM2's answers to eight questions and let the official package judge."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.commands.small_target import convert

    if not (JUDGE / "dflash").is_dir():
        print("the official package is missing: run `make setup` first", file=sys.stderr)
        return 78
    start = time.monotonic()
    convert(TARGET)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    print("SmolLM2 answers eight questions", flush=True)
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
                tokenize=False,
                add_generation_prompt=True,
            ),
            add_special_tokens=False,
        )
        for question in QUESTIONS
    ]
    block = 8
    # The last block of a judged answer has trained slots too: a block of tokens more than is judged.
    lessons = write_lessons(model, prompts, 1 + 4 * block + block - 1)
    with tempfile.TemporaryDirectory(prefix="dflash-overfit-") as folder:
        work = Path(folder)
        config = write_run(
            work,
            lessons,
            {
                "target": {"path": str(TARGET), "dtype": "float32"},
                # Shapes for speed; a drafter that learns by heart needs few features and a narrow MLP.
                "drafter": {
                    "num_layers": 2,
                    "block_size": block,
                    "target_layer_ids": [1, 10, 19],
                    "intermediate_size": 768,
                },
                "data": {"sequence_length": 560, "anchors_per_row": 48},
                "objective": {"weighting": "uniform", "head_chunk": 512},
                "optimizer": {"name": "muon", "lr": 4e-3, "max_steps": 36, "warmup_ratio": 0.1},
                "telemetry": {"every": 4, "tensorboard": False},
            },
        )
        for words in (
            ("run", str(config), "--run-dir", str(work / "run")),
            ("export", str(work / "run"), str(work / "drafter"), "--dtype", "float32"),
        ):
            print("$ python -m trainer", *words, flush=True)
            subprocess.run([sys.executable, "-m", "trainer", *words], check=True, cwd=REPOSITORY)
        lengths = judge(model, work / "drafter", lessons)
    for question, length in zip(QUESTIONS, lengths, strict=True):
        print(f"{length:5.2f} of {block}  {question}")
    mean = sum(lengths) / len(lengths)
    good = mean >= ENOUGH * block
    print(
        f"accepted length {mean:.2f} of {block} ({'at least' if good else 'less than'} {ENOUGH:.0%}), "
        f"every answer the target's own; {time.monotonic() - start:.0f} s"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
