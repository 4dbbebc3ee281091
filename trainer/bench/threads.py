"""Measures several drafters on one device: graphs against compiled code."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from trainer import wording
from trainer.bench.shapes import Preset, drafter_step, rows_of, run_config
from trainer.bench.show import console, ran_as, table
from trainer.bench.timing import seconds
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import CompileReport, Mode
from trainer.pipeline.threads import in_worker_thread


def threads(options: argparse.Namespace) -> dict[str, Any]:
    """Independent drafters on one device, one thread each."""
    device = torch.device(options.device)
    modes: tuple[Mode, ...] = ("compiled", "graph") if device.type == "cuda" else ("eager",)
    found: dict[str, Any] = {}
    rows, losses = [], {}
    reports: list[CompileReport] = []
    for mode in modes:
        for count in (1, options.threads):
            console.print(f"measuring {mode}, {count} threads")
            rate, milliseconds, losses[mode, count], made = _threads_trial(options, device, mode, count)
            reports.extend(made)
            found[f"{mode}_{count}_rows_per_second"] = rate
            rows.append((mode, count, milliseconds, rate))
    table(
        "\n".join(["drafters on one device", *ran_as(reports)]),
        rows,
        "mode",
        "threads",
        "step ms",
        "rows/s, all threads",
    )
    found["compilation"] = [asdict(report) for report in reports]
    if device.type == "cuda":
        found["graph_to_compiled"] = (
            found[f"graph_{options.threads}_rows_per_second"] / found[f"compiled_{options.threads}_rows_per_second"]
        )
        console.print(
            f"{options.threads} graph threads / {options.threads} compiled threads: {found['graph_to_compiled']:.2f}"
        )
    reference = losses[modes[0], 1]
    found["losses"] = {
        f"{mode}, {wording.count(count, 'thread')}": differing(made, reference)
        for (mode, count), made in losses.items()
    }
    for name, (different, largest) in found["losses"].items():
        console.print(
            f"losses of {name}: {different} of {options.steps} differ, by {largest:.1e} of their size at most"
        )
    return found


def differing(losses: Sequence[float], reference: Sequence[float]) -> tuple[int, float]:
    """How many of `losses` are not to the last bit those of `reference`, and the largest relative difference."""
    parted = [abs(loss - right) / abs(right) for loss, right in zip(losses, reference, strict=True) if loss != right]
    return len(parted), max(parted, default=0.0)


def _threads_trial(
    options: argparse.Namespace, device: torch.device, mode: Mode, count: int
) -> tuple[float, float, list[float], list[CompileReport]]:
    """Rows per second of all threads, milliseconds a step, the first thread's losses, and what the threads ran as."""
    preset: Preset = options.shape
    rows = rows_of(preset, 8, device)
    ready = threading.Barrier(count + 1)
    taken = [0.0] * count
    losses: list[float] = []

    def work(number: int, phase: CompilePhase, stream: torch.cuda.Stream | None) -> None:
        step = drafter_step(preset, run_config(options, 1000), device)
        generator = torch.Generator(device).manual_seed(1)
        features = [step.feature_buffers()[0].normal_(generator=generator) for _ in range(2)]
        with phase.turn(f"drafter {number}", device, stream) as turn:
            step.prepare(turn)
        results = [torch.empty_like(step.result) for _ in range(options.steps)]
        ready.wait()
        ready.wait()

        def one(k: int) -> None:
            prepared = rows[k % len(rows)]
            step.load(prepared.row, features[k % 2], None)
            step.accumulate(prepared.valid_slots)
            step.update()
            results[k].copy_(step.result)

        # The other threads' work is not waited for.
        wait = stream.synchronize if stream is not None else lambda: None
        taken[number] = seconds(one, options.steps, wait, warm_up=0)
        if number == 0:
            losses.extend(float(step.read(result.cpu()).sums[0]) for result in results)

    failures: list[BaseException] = []

    def guarded(number: int, phase: CompilePhase) -> None:
        try:
            in_worker_thread(device, lambda stream: work(number, phase, stream))
        except BaseException as error:
            failures.append(error)
            ready.abort()

    with CompilePhase(mode) as phase:
        made = [threading.Thread(target=guarded, args=(number, phase)) for number in range(count)]
        for thread in made:
            thread.start()
        try:
            ready.wait()
            phase.require_compiled()
            phase.close()
            ready.wait()
        except threading.BrokenBarrierError:
            pass
        for thread in made:
            thread.join()
    if failures:
        raise failures[0]
    slowest = max(taken)
    return count * options.steps / slowest, 1e3 * slowest / options.steps, losses, phase.reports
