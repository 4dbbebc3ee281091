"""Measures one target's pass: launched kernel by kernel, captured, and captured with compiled layers."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from trainer.bench.shapes import Preset, load_target, row_source, rows_of
from trainer.bench.show import console, table
from trainer.bench.timing import seconds, synchronise
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import Mode
from trainer.pipeline.threads import in_worker_thread
from trainer.target.features import FeatureMaker


def target_alone(
    options: argparse.Namespace, device: torch.device, mode: Mode | None = None, *, compiles: bool = True
) -> float:
    """Rows per second of one target on its own."""
    preset: Preset = options.shape
    target = load_target(preset, device)
    rows = rows_of(preset, 8, device)

    def work(stream: torch.cuda.Stream | None) -> float:
        maker = FeatureMaker(target, row_source(preset, 8).shape, compiles=compiles)
        with CompilePhase(mode or options.mode) as phase:
            with phase.turn("target 0", device, stream) as turn:
                maker.prepare(turn)
            if (mode or options.mode) == "graph" and compiles:
                report = phase.reports[0]
                console.print(f"target: compiled {report.compiled}, {report.kernels} kernels, {report.note}")
            steps: int = options.steps
            return steps / seconds(
                lambda number: maker.make(rows[number % len(rows)].row), steps, lambda: synchronise(device)
            )

    return float(in_worker_thread(device, work))


def target(options: argparse.Namespace) -> dict[str, Any]:
    """One target's passes: launched one by one, captured as they are, and captured with compiled layers."""
    device = torch.device(options.device)
    ways: list[tuple[str, Mode, bool]] = [("launched", "eager", False)]
    if device.type == "cuda":
        ways += [("captured", "graph", False), ("captured, compiled layers", "graph", True)]
    found: dict[str, float] = {}
    for name, mode, compiles in ways:
        console.print(f"measuring {name}")
        found[name] = target_alone(options, device, mode, compiles=compiles)
    first = next(iter(found.values()))
    table(
        f"{options.preset}: a target's pass over rows of {options.shape.length} tokens",
        [(name, rate, 1e3 / rate, rate / first) for name, rate in found.items()],
        "",
        "rows/s",
        "ms/row",
        "ratio",
    )
    return {"rows_per_second": found}
