"""Measures the pipeline beside its sides alone.

The ratio to the slower side, busy times, the wait for the GIL, and a profile of the hot path that counts host
synchronisations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.bench.gil import GilProbe
from trainer.bench.shapes import Preset, drafter_config, drafter_step, load_target, row_source, rows_of, run_config
from trainer.bench.show import console, ran_as, table
from trainer.bench.target import target_alone
from trainer.bench.timing import seconds, synchronise
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import compiled_graphs
from trainer.pipeline.statistics import describe
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.threads import in_worker_thread
from trainer.pipeline.types import Hooks, Outcome, StepReport

# Calls that make the host wait for a device. cudaEventSynchronize is listed apart: it is the brake that keeps a
# drafter's host at most two steps ahead, on an event of an older step.
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMalloc", "cudaFree")
COUNTED = ("cudaEventSynchronize", "cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")


def drafter_alone(options: argparse.Namespace, device: torch.device) -> float:
    """Rows per second of one drafter on its own, features lying ready on its device."""
    preset: Preset = options.shape
    rows = rows_of(preset, 8, device)

    def work(stream: torch.cuda.Stream | None) -> float:
        step = drafter_step(preset, run_config(options, 1000), device)
        features = [step.feature_buffers()[0].normal_() for _ in range(2)]
        with CompilePhase(options.mode) as phase:
            with phase.turn("drafter 0", device, stream) as turn:
                step.prepare(turn)
            if device.type == "cuda":
                phase.require_compiled()
            phase.close()

            def one(number: int) -> None:
                prepared = rows[number % len(rows)]
                step.load(prepared.row, features[number % 2], None)
                step.accumulate(prepared.valid_slots)
                step.update()

            steps: int = options.steps
            return steps / seconds(one, steps, lambda: synchronise(device))

    return float(in_worker_thread(device, work))


@dataclass
class _Clock:
    """Measures the steps of a running pipeline between warm-up and profile."""

    warm_up: int
    measured: int
    profiled: int
    began: float = 0.0
    ended: float = 0.0
    gil: dict[str, float] | None = None
    calls: Counter[str] | None = None
    _probe: GilProbe | None = None
    _profiler: Any = None

    @property
    def steps(self) -> int:
        return self.warm_up + self.measured + self.profiled + 2

    def on_step(self, report: StepReport) -> None:
        if report.step == self.warm_up:
            self.began = time.perf_counter()
            self._probe = GilProbe()
            self._probe.start()
        elif report.step == self.warm_up + self.measured:
            self.ended = time.perf_counter()
            assert self._probe is not None
            self.gil = self._probe.finish()
            if self.profiled and torch.cuda.is_available():
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.start()
        elif report.step == self.warm_up + self.measured + self.profiled and self._profiler is not None:
            self._profiler.stop()
            self.calls = _runtime_calls(self._profiler)
            self._profiler = None


def _runtime_calls(profiler: Any) -> Counter[str]:
    """How often each function of the CUDA runtime was called, in all threads."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))


def pipeline(options: argparse.Namespace) -> dict[str, Any]:
    """Target alone, drafter alone, and the pipeline."""
    targets, drafters = options.targets or [options.device], options.drafters or [options.device]
    colocated = bool(set(targets) & set(drafters)) and options.device != "cpu"
    idle_gil = GilProbe.of_idle_process()
    console.print("measuring one target alone")
    target_rate, _ = target_alone(options, torch.device(targets[0]))
    console.print("measuring one drafter alone")
    drafter_rate = drafter_alone(options, torch.device(drafters[0]))
    clock = _Clock(warm_up=5, measured=options.steps, profiled=options.profile_steps)
    compiled: list[dict[str, Any]] = []
    graphs_at_start = 0

    def on_compiled(reports: list[dict[str, Any]]) -> None:
        nonlocal graphs_at_start
        compiled.extend(reports)
        graphs_at_start = compiled_graphs()

    console.print("measuring the pipeline")
    outcome: Outcome = Pipeline(
        run_config(options, clock.steps),
        drafter_config(options.shape),
        row_source(options.shape, clock.steps * len(drafters)),
        Hooks(on_step=clock.on_step, on_compiled=on_compiled),
        load_target=lambda device: load_target(options.shape, device),
    ).run()
    rate = options.steps * len(drafters) / (clock.ended - clock.began)
    bound = possible_rate(targets, drafters, target_rate, drafter_rate, shared=colocated)
    result: dict[str, Any] = {
        "target_alone_rows_per_second": target_rate,
        "drafter_alone_rows_per_second": drafter_rate,
        "pipeline_rows_per_second": rate,
        "bound": "time-shared" if colocated else "slower side",
        "ratio": rate / bound,
        "gil_wait_us": {"idle process": idle_gil, "pipeline": clock.gil},
        "workers": outcome.workers,
        "compilation": compiled,
        "recompiles_after_start": compiled_graphs() - graphs_at_start,
    }
    if clock.calls is not None:
        per_step = {name: clock.calls[name] / clock.profiled for name in (*SYNCHRONISING, *COUNTED)}
        result["cuda_calls_per_step"] = per_step
        result["host_synchronisations_per_step"] = sum(per_step[name] for name in SYNCHRONISING)
    _show(options, result, f"pipeline, {len(targets)} + {len(drafters)}", clock.profiled)
    return result


def possible_rate(
    targets: Sequence[str], drafters: Sequence[str], target_rate: float, drafter_rate: float, *, shared: bool
) -> float:
    """Rows per second that the devices allow: each does one thing at a time, for the workers that it holds.

    Args:
        targets, drafters: the device of each worker; rows are shared out evenly on both sides.
        target_rate, drafter_rate: rows per second of one worker with a device of its own.
        shared: whether workers of one device take turns; on a CPU each has cores of its own.
    """
    loads: defaultdict[str, float] = defaultdict(float)
    for number, device in enumerate(targets):
        loads[device if shared else f"target {number}"] += 1 / (target_rate * len(targets))
    for number, device in enumerate(drafters):
        loads[device if shared else f"drafter {number}"] += 1 / (drafter_rate * len(drafters))
    return 1 / max(loads.values())


def _show(options: argparse.Namespace, result: dict[str, Any], split: str, profiled: int) -> None:
    """Print the tables; `split` is how many targets and drafters were measured."""
    target, drafter = result["target_alone_rows_per_second"], result["drafter_alone_rows_per_second"]
    rate = result["pipeline_rows_per_second"]
    bound = "time-shared bound" if result["bound"] == "time-shared" else result["bound"]
    workers = {name: value for name, value in result["workers"].items() if isinstance(value, dict) and "busy" in value}
    table(
        "\n".join(
            [
                f"{options.preset}: rows of {options.shape.length} tokens, {options.shape.anchors} anchors, "
                f"{options.mode}",
                *ran_as(result["compilation"]),
            ]
        ),
        [
            ("one target alone", target, 1e3 / target),
            ("one drafter alone", drafter, 1e3 / drafter),
            (split, rate, 1e3 / rate),
            ("pipeline / " + bound, result["ratio"], ""),
        ],
        "",
        "rows/s",
        "ms/row",
    )
    table(
        "workers",
        [(name, w["device"], w["busy"], w["rows"], 1e3 * (w["row_seconds"] or 0.0)) for name, w in workers.items()],
        "worker",
        "device",
        "busy share",
        "rows",
        "busy ms/row",
    )
    console.print(describe(result["workers"]))
    table(
        "wait for the GIL",
        [(name, wait["mean"], wait["p99"]) for name, wait in result["gil_wait_us"].items() if wait is not None],
        "",
        "mean us",
        "99th percentile us",
    )
    console.print(f"recompiles after the start: {result['recompiles_after_start']}")
    if (per_step := result.get("cuda_calls_per_step")) is not None:
        table(
            f"CUDA runtime calls per step, all threads, {profiled} steps profiled",
            [
                (name, count, "waits for the device" if name in SYNCHRONISING else "")
                for name, count in per_step.items()
            ],
            "call",
            "per step",
            "",
        )
