"""Tests, measures and trains on this machine's GPUs, and writes the record of the commit (`make gpu`).

    python -m benchmarks.gpu [--parts tests bench peers run] [--only TEXT ...] [--seconds N]
                             [--small-target DIR] [--peers DIR] [--commit HASH]

tests  the tests marked `gpu`
bench  `trainer bench` at the shapes of SmolLM2 and Qwen3-8B
peers  one drafter step beside the public trainers; needs --peers, see benchmarks/drafter_step.py
run    the small target writes answers, a drafter trains on them for 300 steps, its export is evaluated; needs
       --small-target, a folder that `trainer small-target` made

The record is benchmarks/results/<date>-<commit>.json; a second call on the same code adds its parts. Ends
with 1 where a test failed, a part failed, or a worker ran slower than was asked without a field that allows it. Needs
no network. On one H200 the first three parts take about seven minutes, the last two.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import REPOSITORY, Record, fallbacks, newest, trainer_hash
from trainer.arguments import read
from trainer.commands import bench

PARTS = ("tests", "bench", "peers", "run")
# In the order of their weight: what --seconds leaves no time for stands last.
BENCHMARKS: dict[str, list[str]] = {
    "step qwen3-8b": ["step", "--preset", "qwen3-8b", "--steps", "10"],
    "target qwen3-8b": ["target", "--preset", "qwen3-8b", "--steps", "8"],
    "target smollm2": ["target", "--preset", "smollm2"],
    "step smollm2": ["step", "--preset", "smollm2"],
    "pipeline smollm2, one GPU": ["pipeline", "--preset", "smollm2", "--steps", "200", "--profile-steps", "30"],
    "first-step qwen3-8b, 2 drafters": [
        *("first-step", "--preset", "qwen3-8b", "--targets", "cuda:0", "--drafters", "cuda:0", "cuda:0"),
    ],
    "pipeline smollm2, one GPU, 3 drafters": [
        *("pipeline", "--preset", "smollm2", "--steps", "80", "--profile-steps", "0"),
        *("--targets", "cuda:0", "--drafters", "cuda:0", "cuda:0", "cuda:0"),
    ],
    "threads smollm2": ["threads", "--preset", "smollm2", "--steps", "40"],
    "step qwen3-8b muon": ["step", "--preset", "qwen3-8b", "--steps", "6", "--optimizer", "muon"],
    "pipeline qwen3-8b, one GPU": ["pipeline", "--preset", "qwen3-8b", "--steps", "16", "--profile-steps", "0"],
}
ON_TWO: dict[str, list[str]] = {
    "pipeline smollm2, two GPUs": [
        *("pipeline", "--preset", "smollm2", "--steps", "200", "--profile-steps", "30"),
        *("--targets", "cuda:0", "--drafters", "cuda:1"),
    ],
    "pipeline qwen3-8b, two GPUs": [
        *("pipeline", "--preset", "qwen3-8b", "--steps", "16", "--profile-steps", "0"),
        *("--targets", "cuda:0", "--drafters", "cuda:1"),
    ],
}
STEPS = 300
TOPICS = ("rivers", "trains", "bread", "the moon", "chess", "tea", "glass", "bees", "maps", "music", "salt", "winter")
ASKED = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Why do people like {}?",
)
HELD_OUT = ("What is the history of {}?",)
CONFIG = """\
target: {{path: {target}}}
data: {{sources: [{answers}], sequence_length: 2048, anchors_per_row: 256, epochs: 1000}}
optimizer: {{max_steps: {steps}}}
pipeline: {{targets: ["cuda:0"], drafters: ["cuda:0"], compile_cache: {cache}}}
telemetry: {{tensorboard: false}}
"""


def main() -> int:
    """Measure the parts that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="benchmarks with one of these in the name"
    )
    parser.add_argument(
        "--seconds", type=int, default=360, help="start no further benchmark after so long (%(default)s)"
    )
    parser.add_argument("--small-target", type=Path, default=REPOSITORY / ".cache" / "smollm2")
    parser.add_argument("--peers", type=Path, help="folder with the unpacked wheels of the peers")
    parser.add_argument("--commit", help="what is measured, where git is not there to say it, or says something else")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("make gpu: this machine has no CUDA device that torch can use", file=sys.stderr)
        return 78
    record = _begin(options.commit)
    began = time.monotonic()
    doing = {"tests": _tests, "bench": _bench, "peers": _peers, "run": _run}
    for part in options.parts:
        start = time.monotonic()
        print(f"=== {part}", flush=True)
        try:
            doing[part](record, options)
        except Exception as error:  # the other parts have something to say all the same
            traceback.print_exc()
            record.failures.append(
                f"{part}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        record.parts.setdefault(part, {})["seconds"] = round(time.monotonic() - start, 1)
        path = record.write()
    print(f"=== {path.relative_to(REPOSITORY)} after {time.monotonic() - began:.0f} s")
    return _say(record)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _begin(commit: str | None) -> Record:
    """The record of this commit: a new one, or today's with what it holds already."""

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    known = git("rev-parse", "HEAD")
    if known is None and commit is None:
        raise SystemExit("make gpu: no git history here; name what is measured: --commit HASH")
    changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    record = Record(
        date=datetime.date.today().isoformat(),
        commit=commit or str(known),
        dirty=None if changes is None or commit else bool(changes),
        trainer=trainer_hash(),
        machine=_machine(),
    )
    earlier = newest(of=record.commit)
    return earlier if earlier is not None and earlier.trainer == record.trainer else record


def _machine() -> dict[str, Any]:
    import transformers

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


# --------------------------------------------------------------------------------------------------------------- tests


def _tests(record: Record, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/trainer", "-q", "-rfE", "--timeout", "280"]
    if _has("xdist"):
        command += ["-n", "8", "--dist", "loadgroup"]
    made = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    print(made.stdout[-6000:], flush=True)
    lines = made.stdout.splitlines()
    closing = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", closing)}
    record.parts["tests"] = {"closing": closing.strip("= "), "counts": counts}
    record.failures += [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if made.returncode != 0 and not any(line.startswith(("FAILED", "ERROR")) for line in lines):
        record.failures.append(f"tests: pytest ended with {made.returncode}")
    if not counts.get("passed"):
        record.failures.append("tests: none passed")


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


# --------------------------------------------------------------------------------------------------------------- bench


def _bench(record: Record, options: argparse.Namespace) -> None:
    record.add("bf16 matrix product", _ceiling(), "TFLOP/s", "higher")
    part = record.parts.setdefault("bench", {})
    began = time.monotonic()
    two = torch.cuda.device_count() > 1
    for name, words in (BENCHMARKS | (ON_TWO if two else {})).items():
        if name in part or not any(text in name for text in options.only):
            continue
        if time.monotonic() - began > options.seconds:
            record.not_run[name] = f"the {options.seconds} s of --seconds were over"
            continue
        record.not_run.pop(name, None)
        print(f"--- {name}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()
        start = time.monotonic()
        try:
            found = bench.measure(read(["bench", *words]))
        except Exception as error:
            traceback.print_exc()
            record.failures.append(f"bench {name}: {_first_line(error)}")
            continue
        found["seconds"] = round(time.monotonic() - start, 1)
        part[name] = found
        _figures(record, name, found)
    if not two:
        record.not_run |= dict.fromkeys(ON_TWO, "one GPU here")


def _ceiling() -> float:
    """TFLOP/s of a bfloat16 product of random 8192 x 8192 matrices: the median of 20."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(24)]
    for mark in marks:
        torch.mm(a, b)
        mark.record()
    torch.cuda.synchronize()
    times = sorted(one.elapsed_time(other) for one, other in itertools.pairwise(marks[3:]))
    return 2 * 8192**3 / times[len(times) // 2] / 1e9


def _figures(record: Record, name: str, found: dict[str, Any]) -> None:
    kind = found["benchmark"]
    reports = found.get("compilation", [])
    record.fallbacks += fallbacks(name, reports)
    record.not_run |= {f"{name}: {way}": reason for way, reason in found.get("not_run", {}).items()}
    if kind == "target":
        for way, rate in found["rows_per_second"].items():
            record.add(f"{name}, {way}", rate and 1e3 / rate, "ms/row", "lower")
    elif kind == "step":
        record.add(name, found["step_milliseconds"], "ms", "lower")
        for piece, value in found["milliseconds"].items():
            record.add(f"{name}, {piece}", value, "ms", "lower")
        record.add(f"{name}, memory", found["peak_gib"], "GiB", "lower")
        record.add(f"{name}, compiling", reports[0]["seconds"], "s", "lower")
    elif kind == "pipeline":
        record.add(name, found["pipeline_rows_per_second"], "rows/s", "higher")
        record.add(f"{name}, of what the devices allow", found["ratio"], "", "higher")
        record.add(f"{name}, recompiles", found["recompiles_after_start"], "", "lower")
        record.add(f"{name}, host waits a step", found.get("host_synchronisations_per_step"), "", "lower")
    elif kind == "threads":
        for key, value in found.items():
            if key.endswith("rows_per_second"):
                record.add(f"{name}, {key.removesuffix('_rows_per_second')}", value, "rows/s", "higher")
        record.add(f"{name}, graph to compiled", found.get("graph_to_compiled"), "", "higher")
        record.add(f"{name}, unequal losses", sum(count for count, _ in found["losses"].values()), "", "lower")
    else:
        for state in ("cold", "warm"):
            record.add(f"{name}, {state} cache", found[state]["seconds"], "s", "lower")
            record.fallbacks += fallbacks(f"{name}, {state}", found[state]["compilation"])
            for worker, value in found[state]["compile_seconds_of"].items():
                record.add(f"{name}, {state} cache, compiling {worker}", value, "s", "lower")


# --------------------------------------------------------------------------------------------------------------- peers


def _peers(record: Record, options: argparse.Namespace) -> None:
    if options.peers is None:
        record.not_run["peers"] = "no --peers"
        return
    part = record.parts["peers"] = {}
    for shape, rounds, steps in (("qwen3-8b", 3, 4), ("smollm2", 3, 10)):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [
                *(sys.executable, "benchmarks/drafter_step.py", "--peers", str(options.peers), "--shape", shape),
                *("--device", "cuda:0", "--rounds", str(rounds), "--steps", str(steps), "--json", file.name),
                *("--contestants", "dflash graph", "specforge"),
            ]
            subprocess.run(command, cwd=REPOSITORY, check=True)
            part[shape] = json.loads(Path(file.name).read_text())
        for row in part[shape]["rows"]:
            record.add(f"peers {shape}, {row['contestant']}", row["median_ms"], "ms", "lower")
            record.add(f"peers {shape}, {row['contestant']}, memory", row["peak_gib"], "GiB", "lower")
        record.not_run |= {f"peers {shape}, {name}": error for name, error in part[shape]["failed"].items()}


# ----------------------------------------------------------------------------------------------------------------- run


def _run(record: Record, options: argparse.Namespace) -> None:
    if not (options.small_target / "config.json").is_file():
        record.not_run["run"] = f"no small target in {options.small_target}: make it with `trainer small-target`"
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        answers, run, export = folder / "answers.jsonl", folder / "run", folder / "export"
        config = folder / "run.yaml"
        config.write_text(
            CONFIG.format(target=options.small_target.resolve(), answers=answers, steps=STEPS, cache=folder / "cache")
        )
        asked, held_out = folder / "prompts.jsonl", folder / "held-out.jsonl"
        for file, forms in ((asked, ASKED), (held_out, HELD_OUT)):
            prompts = [form.format(topic) for form in forms for topic in TOPICS]
            file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        start = time.monotonic()
        _trainer(
            *("regenerate", config, "--prompts", asked, "--output", answers),
            *("--max-new-tokens", 256, "--batch-size", 48, "--temperature", 0),
        )
        record.add("run: regenerate 48 answers", time.monotonic() - start, "s", "lower")
        start = time.monotonic()
        _trainer("run", config, "--run-dir", run)
        record.add(f"run: {STEPS} steps, start included", time.monotonic() - start, "s", "lower")
        compiled = json.loads((run / "compile.json").read_text())
        reports = compiled if isinstance(compiled, list) else compiled["workers"]
        record.fallbacks += fallbacks("run", reports)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in steps if line.get("kind") == "step"]
        rates = sorted(line["tokens_per_second"] for line in steps if line.get("tokens_per_second"))
        record.add("run: tokens/s, median", rates[len(rates) // 2] if rates else None, "tokens/s", "higher")
        record.add("run: accepted length in training, last", steps[-1].get("accept_length"), "", "higher")
        _trainer("export", run, export, "--dtype", "bfloat16")
        output = folder / "evaluation.json"
        _trainer(
            *("evaluate", export, "--target", options.small_target.resolve(), "--prompts", held_out),
            *("--max-new-tokens", 128, "--output", output),
        )
        evaluation = json.loads(output.read_text())
        (held,) = evaluation["sets"]
        record.add("run: accepted length, held out, in decoding", held["acceptance_length"], "", "higher")
        record.add("run: speedup of our own decoding loop, held out", held["speedup"], "", "higher")
        record.parts["run"] = {"compilation": reports, "last_step": steps[-1], "evaluation": evaluation}


def _trainer(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "trainer", *map(str, arguments)], cwd=REPOSITORY, check=True)


# ---------------------------------------------------------------------------------------------------------------- end


def _say(record: Record) -> int:
    """Print what the record holds, and what speaks against the commit; returns the exit code."""
    for name, figure in record.figures.items():
        print(f"{name:70s} {figure.value:>12,.4g} {figure.unit}")
    for name, reason in record.not_run.items():
        print(f"not run: {name}: {reason}")
    earlier = newest(other_than=record.commit)
    worse: Sequence[str] = record.compared_with(earlier) if earlier is not None else ()
    for line in worse:
        print(f"worse: {line}")
    against = [*record.failures, *(f"fallback: {line}" for line in record.fallbacks)]
    for line in against:
        print(f"AGAINST: {line}")
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
