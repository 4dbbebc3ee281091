"""Measures one target's pass: launched kernel by kernel, captured, and captured with compiled layers."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from trainer.bench.shapes import Preset, load_target, row_source, rows_of
from trainer.bench.show import console, ran_as, table
from trainer.bench.timing import seconds, synchronise
from trainer.compilation.errors import CompilationError
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import CompileReport, Mode
from trainer.pipeline.threads import in_worker_thread
from trainer.target.features import FeatureMaker


def target_alone(
    options: argparse.Namespace, device: torch.device, mode: Mode | None = None, *, compiles: bool = True
) -> tuple[float, CompileReport]:
    """Rows per second of one target on its own, and what it ran as.

    Raises:
        CompilationError: the target does not get what is to be measured.
    """
    preset: Preset = options.shape
    target = load_target(preset, device)
    rows = rows_of(preset, 8, device)

    def work(stream: torch.cuda.Stream | None) -> tuple[float, CompileReport]:
        maker = FeatureMaker(target, row_source(preset, 8).shape, compiles=compiles)
        with CompilePhase(mode or options.mode) as phase:
            with phase.turn("target 0", device, stream) as turn:
                maker.prepare(turn)
            if device.type == "cuda":
                phase.require_compiled()
            steps: int = options.steps
            taken = seconds(lambda number: maker.make(rows[number % len(rows)].row), steps, lambda: synchronise(device))
            return steps / taken, phase.reports[0]

    return in_worker_thread(device, work)


def target(options: argparse.Namespace) -> dict[str, Any]:
    """One target's passes: launched one by one, captured as they are, and captured with compiled layers."""
    device = torch.device(options.device)
    ways: list[tuple[str, Mode, bool]] = [("launched", "eager", False)]
    if device.type == "cuda":
        ways += [("captured", "graph", False), ("captured, compiled layers", "graph", True)]
    rates: dict[str, float | None] = {}
    not_run: dict[str, str] = {}
    reports: list[CompileReport] = []
    for name, mode, compiles in ways:
        console.print(f"measuring {name}")
        try:
            rates[name], report = target_alone(options, device, mode, compiles=compiles)
            reports.append(report)
        except CompilationError as error:
            rates[name], not_run[name] = None, str(error)
            console.print(f"{name}: not run: {error}")
    first = next(iter(rates.values()))
    table(
        "\n".join([f"{options.preset}: a target's pass over rows of {options.shape.length} tokens", *ran_as(reports)]),
        [(name, rate, rate and 1e3 / rate, rate and first and rate / first) for name, rate in rates.items()],
        "",
        "rows/s",
        "ms/row",
        "ratio",
    )
    return {"rows_per_second": rates, "not_run": not_run, "compilation": [asdict(report) for report in reports]}
