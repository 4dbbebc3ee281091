"""Measures the seconds from the start of a process to its first optimizer step."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from trainer.bench.shapes import drafter_config, load_target, row_source, run_config
from trainer.bench.show import console, table
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.types import Hooks
from trainer.target.model import Target


def first_step(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first optimizer step of a fresh process: first with an empty cache, then with the full one."""
    if options.once:
        return _first_step_here(options)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        cache = options.cache or Path(temporary)
        for state in ("cold", "warm"):
            command = [sys.executable, "-m", "trainer", "bench", "first-step", "--once", "--cache", str(cache)]
            for name in ("preset", "length", "anchors", "mode", "optimizer", "device"):
                if (value := getattr(options, name)) is not None:
                    command += [f"--{name}", str(value)]
            for name in ("targets", "drafters"):
                if (devices := getattr(options, name)) is not None:
                    command += [f"--{name}", *devices]
            start = time.time()
            console.print(f"{state} start")
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            made = json.loads(output.splitlines()[-1])
            found[state] = {"seconds": made["at"] - start, **made}
    table(
        f"{options.preset}: process start to first optimizer step",
        [
            (state, round(f["seconds"], 1), round(f["target_loaded"], 1), f["compile_seconds"], f["hits"], f["misses"])
            for state, f in found.items()
        ],
        "cache",
        "seconds",
        "of these before the target was loaded",
        "compiling",
        "hits",
        "misses",
    )
    return found


def _first_step_here(options: argparse.Namespace) -> dict[str, Any]:
    start = time.time()
    config = run_config(options, 1)
    pipeline_section = config.pipeline.model_copy(update={"compile_cache": options.cache})
    config = config.model_copy(update={"pipeline": pipeline_section})
    at: dict[str, Any] = {}
    compiled: list[dict[str, Any]] = []

    def load(device: torch.device) -> Target:
        target = load_target(options.shape, device)
        at["target_loaded"] = time.time() - start
        return target

    Pipeline(
        config,
        drafter_config(options.shape),
        row_source(options.shape, len(config.pipeline.drafters)),
        Hooks(on_step=lambda report: at.setdefault("at", time.time()), on_compiled=compiled.extend),
        load_target=load,
    ).run()
    return {
        **at,
        "compile_seconds": round(sum(r["seconds"] for r in compiled), 2),
        "compile_seconds_of": {r["worker"]: r["seconds"] for r in compiled},
        "compilation": compiled,
        "hits": sum(r["cache_hits"] for r in compiled),
        "misses": sum(r["cache_misses"] for r in compiled),
    }
