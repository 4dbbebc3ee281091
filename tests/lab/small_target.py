"""Makes what the lab's container trains on: SmolLM2-135M-Instruct and text that it wrote itself, kept once made.

    python -m tests.lab.small_target

Everything lies in .cache/small-target, which the container sees read-only as /srv/small-target. The folder itself is
never replaced, so that a lab that stands already sees what comes later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.lab.lab import REPOSITORY, SMALL_TARGET

MODEL = REPOSITORY / ".cache" / "smollm2"
CHATS = SMALL_TARGET / "chats.jsonl"
ANSWERS = 24
ANSWER_TOKENS = 96
CONFIG = f"""\
target: {{path: {MODEL}, dtype: float32}}
data: {{sources: [{CHATS}]}}
pipeline: {{targets: [cpu], drafters: [cpu]}}
"""


def prepare() -> Path:
    """The folder, with the model and `chats.jsonl` in it. Resumes what was cut off."""
    SMALL_TARGET.mkdir(parents=True, exist_ok=True)
    if not (MODEL / "config.json").exists():
        print("small target: converting SmolLM2-135M-Instruct to safetensors, once", flush=True)
        trainer("small-target", str(MODEL))
    for file in MODEL.iterdir():
        placed = SMALL_TARGET / file.name
        if not placed.exists() or not placed.samefile(file):
            link = SMALL_TARGET / f".{file.name}.new"
            link.unlink(missing_ok=True)
            os.link(file, link)
            link.replace(placed)
    if not CHATS.exists():
        print(f"small target: it writes {ANSWERS} answers to train on, a minute or two, once", flush=True)
        config = SMALL_TARGET / "regenerate.yaml"
        config.write_text(CONFIG)
        growing = SMALL_TARGET / "chats.partial.jsonl"
        trainer(
            "regenerate", str(config), "--prompts", "human-eval", "--output", str(growing), "--limit", str(ANSWERS),
            "--max-new-tokens", str(ANSWER_TOKENS), "--batch-size", "12", "--temperature", "0",
        )  # fmt: skip
        growing.replace(CHATS)
    return SMALL_TARGET


def trainer(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "trainer", *arguments], check=True, cwd=REPOSITORY, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    print(prepare())
