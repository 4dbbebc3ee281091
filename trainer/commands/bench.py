"""Runs one benchmark and prints its table and a line of JSON.

`python -m trainer bench pipeline|target|threads|step|first-step`, each with `--help`. Targets have random weights and
documents random tokens: speed does not depend on either, and nothing has to be downloaded. Every benchmark prints a
table and ends with one line of JSON.

target      one target's pass: launched kernel by kernel, captured, and captured with compiled layers
pipeline    target alone, drafter alone, both together; the ratio to the slower side, busy times, the wait for the GIL,
            and a profile of the hot path that counts host synchronisations
threads     several drafters on one device: graphs against compiled code
step        one drafter step, piece by piece
first-step  seconds from the start of a process to its first optimizer step, with an empty and with a full cache
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import torch

from trainer.bench.first_step import first_step
from trainer.bench.pipeline import pipeline
from trainer.bench.shapes import PRESETS
from trainer.bench.step import step
from trainer.bench.target import target
from trainer.bench.threads import threads
from trainer.devices import find_device
from trainer.wording import finite


def main(options: argparse.Namespace) -> int:
    """Run one benchmark and print its line of JSON."""
    print(json.dumps(finite(measure(options)), default=str))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one benchmark; returns what its line of JSON says."""
    gpu = torch.cuda.is_available()
    options.preset = options.preset or ("smollm2" if gpu else "tiny")
    options.mode = options.mode or ("graph" if gpu else "eager")
    options.steps = options.steps or (60 if gpu else 20)
    options.device = str(find_device(options.device or ("cuda:0" if gpu else "cpu")))
    for side in ("targets", "drafters"):
        if (names := getattr(options, side)) is not None:
            setattr(options, side, [str(find_device(name)) for name in names])
    preset = PRESETS[options.preset]
    options.shape = replace(preset, length=options.length or preset.length, anchors=options.anchors or preset.anchors)
    run = {"pipeline": pipeline, "target": target, "threads": threads, "step": step, "first-step": first_step}[
        options.benchmark
    ]
    return {"benchmark": options.benchmark, "machine": machine(), "preset": options.preset, **run(options)}


def machine() -> dict[str, Any]:
    """What was measured on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "python": sys.version.split()[0], "gpus": gpus, "cpus": torch.get_num_threads()}
