"""How fast are the pipeline and its parts, and is the hot path free of what it must be free of?

`python -m trainer bench pipeline|target|threads|step|first-step`, each with `--help`. Targets have random weights and
documents random tokens: speed does not depend on either, and nothing has to be downloaded. Every benchmark prints a
table and ends with one line of JSON.

target      one target's pass: launched kernel by kernel, captured, and captured with compiled layers
pipeline    target alone, drafter alone, both together; the ratio to the slower side, busy times, the wait for the GIL,
            and a profile of the hot path that counts host synchronisations
threads     several drafters on one device: graphs against compiled code
step        one drafter step, piece by piece
first-step  seconds from the start of a process to its first optimizer step, with an empty and with a full cache

GIL wait: a probe thread sleeps for a millisecond, again and again, and notes by how much it overslept. A sleeper needs
the GIL to go on, so what it oversleeps more than on the idle process is the time that a worker, too, waits for the GIL
after each blocking call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trainer import wording
from trainer.compilation.phase import CompilePhase, Mode, compiled_graphs
from trainer.config.sections import RunConfig
from trainer.data.documents import Documents
from trainer.data.rows import RowSource
from trainer.devices import find_device
from trainer.drafter.config import DrafterConfig
from trainer.pipeline.plan import describe
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.threads import in_worker_thread
from trainer.pipeline.types import Hooks, Outcome, StepReport
from trainer.step.step import DrafterStep, PreparedRow
from trainer.target.features import FeatureMaker
from trainer.target.model import Target

console = Console(stderr=True)

# Calls that make the host wait for a device. cudaEventSynchronize is listed apart: it is the brake that keeps a
# drafter's host at most two steps ahead, on an event of an older step.
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMalloc", "cudaFree")
COUNTED = ("cudaEventSynchronize", "cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")


@dataclass(frozen=True)
class Preset:
    """The shapes of a target, its drafter and a row."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    taps: tuple[int, ...]
    drafter_layers: int
    block: int
    length: int
    anchors: int
    head_chunk: int = 4096


PRESETS = {
    "tiny": Preset(64, 128, 4, 4, 2, 16, 512, True, (0, 2), 2, 8, 256, 32, 128),
    "smollm2": Preset(576, 1536, 30, 9, 3, 64, 49152, True, (1, 8, 14, 21, 27), 5, 16, 2048, 128),
    "qwen3-8b": Preset(4096, 12288, 36, 32, 8, 128, 151936, False, (1, 9, 17, 25, 33), 5, 16, 8192, 512),
}


def main(options: argparse.Namespace) -> int:
    """Run one benchmark."""
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
    result = {"benchmark": options.benchmark, "machine": machine(), "preset": options.preset, **run(options)}
    print(json.dumps(result, default=str))
    return 0


def machine() -> dict[str, Any]:
    """What was measured on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "python": sys.version.split()[0], "gpus": gpus, "cpus": torch.get_num_threads()}


# ------------------------------------------------------------------------------------------------------------ materials


def drafter_config(preset: Preset) -> DrafterConfig:
    """The drafter of a preset."""
    return DrafterConfig(
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.drafter_layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        vocab_size=preset.vocabulary,
        num_target_layers=preset.layers,
        target_layer_ids=preset.taps,
        block_size=preset.block,
        mask_token_id=3,
        layer_types=tuple("full_attention" for _ in range(preset.drafter_layers)),
    )


def load_target(preset: Preset, device: torch.device) -> Target:
    """A target of the preset's shape with random weights, bfloat16 on a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        vocab_size=preset.vocabulary,
        tie_word_embeddings=preset.tied,
        max_position_embeddings=preset.length,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model, preset.taps, device)


def row_source(preset: Preset, rows: int) -> RowSource:
    """At least `rows` rows of random documents, each a quarter of a row or less."""
    random = np.random.default_rng(0)
    documents = []
    for _ in range(64):
        length = int(random.integers(preset.length // 8, preset.length // 4))
        ids = random.integers(4, preset.vocabulary, size=length).tolist()
        documents.append((ids, [True] * length))
    made = Documents.from_lists(documents)

    def source(epochs: int) -> RowSource:
        return RowSource(made, sequence_length=preset.length, anchors_per_row=preset.anchors, epochs=epochs, seed=0)

    return source(-(-rows // source(1).rows_per_epoch))


def run_config(options: argparse.Namespace, steps: int) -> RunConfig:
    """A run of so many steps, as `options` describe it."""
    preset: Preset = options.shape
    return RunConfig.model_validate(
        {
            "target": {"path": "random"},
            "data": {
                "sources": ["random"],
                "sequence_length": preset.length,
                "anchors_per_row": preset.anchors,
            },
            "objective": {"head_chunk": preset.head_chunk},
            "optimizer": {"max_steps": steps, "name": options.optimizer},
            "checkpoint": {"every": 10**9},
            "pipeline": {
                "targets": options.targets or [options.device],
                "drafters": options.drafters or [options.device],
                "mode": options.mode,
            },
        }
    )


def drafter_step(options: argparse.Namespace, device: torch.device) -> DrafterStep:
    """A drafter step with a random drafter, embedding and head."""
    preset: Preset = options.shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def table() -> torch.Tensor:
        made = torch.empty(preset.vocabulary, preset.hidden, dtype=dtype, device=device)
        return made.normal_(0.0, 0.02, generator=generator)

    embedding = table()
    head = embedding if preset.tied else table()
    return DrafterStep.build(
        run_config(options, 1000), drafter_config(preset), embedding=embedding, head=head, total_steps=1000
    )


def rows_of(preset: Preset, count: int, device: torch.device) -> list[PreparedRow]:
    """Prepared rows."""
    source = row_source(preset, count)
    return [PreparedRow.of(source.row(n), preset.block, pin=device.type == "cuda") for n in range(count)]


def synchronise(device: torch.device) -> None:
    """Wait for a device, if it is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class GilProbe(threading.Thread):
    """Notes by how much a sleep of a millisecond oversleeps; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__(name="gil probe", daemon=True)
        self._stop_asked = threading.Event()
        self.overslept: list[float] = []

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stop_asked.is_set():
            start = time.perf_counter()
            time.sleep(0.001)
            self.overslept.append(time.perf_counter() - start - 0.001)

    def finish(self) -> dict[str, float]:
        """Stop; microseconds overslept."""
        self._stop_asked.set()
        self.join()
        values = np.array(self.overslept) * 1e6
        return {"mean": round(float(values.mean()), 1), "p99": round(float(np.quantile(values, 0.99)), 1)}

    @classmethod
    def of_idle_process(cls) -> dict[str, float]:
        """What a sleep oversleeps when nobody else runs."""
        probe = cls()
        probe.start()
        time.sleep(0.3)
        return probe.finish()


def table(title: str, rows: Sequence[tuple[Any, ...]], *columns: str) -> None:
    """Print a table to stderr; stdout is for the JSON."""
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row))
    console.print(made)


# ------------------------------------------------------------------------------------------------------------- pipeline


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
            with phase.turn("target 0", device, stream, required=False) as turn:
                maker.prepare(turn)
            if (mode or options.mode) == "graph" and compiles:
                report = phase.reports[0]
                console.print(f"target: compiled {report.compiled}, {report.kernels} kernels, {report.note}")
            for prepared in rows[:3]:
                maker.make(prepared.row)
            synchronise(device)
            start = time.perf_counter()
            for number in range(options.steps):
                maker.make(rows[number % len(rows)].row)
            synchronise(device)
            return float(options.steps / (time.perf_counter() - start))

    return float(in_worker_thread(device, work))


def drafter_alone(options: argparse.Namespace, device: torch.device) -> float:
    """Rows per second of one drafter on its own, features lying ready on its device."""
    preset: Preset = options.shape
    rows = rows_of(preset, 8, device)

    def work(stream: torch.cuda.Stream | None) -> float:
        step = drafter_step(options, device)
        features = [step.feature_buffers()[0].normal_() for _ in range(2)]
        with CompilePhase(options.mode) as phase:
            with phase.turn("drafter 0", device, stream) as turn:
                step.prepare(turn)
            phase.close()

            def one(number: int) -> None:
                prepared = rows[number % len(rows)]
                step.load(prepared.row, features[number % 2], None)
                step.accumulate(prepared.valid_slots)
                step.update()

            for number in range(3):
                one(number)
            synchronise(device)
            start = time.perf_counter()
            for number in range(options.steps):
                one(number)
            synchronise(device)
            return float(options.steps / (time.perf_counter() - start))

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
    target_rate = target_alone(options, torch.device(targets[0]))
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
    sides = {"targets": len(targets) * target_rate, "drafters": len(drafters) * drafter_rate}
    bound = min(sides.values())
    if colocated:  # the device does one thing at a time at best
        bound = 1 / sum(1 / side for side in sides.values())
    workers = {name: value for name, value in outcome.workers.items() if isinstance(value, dict) and "busy" in value}
    table(
        f"{options.preset}: rows of {options.shape.length} tokens, {options.shape.anchors} anchors, {options.mode}",
        [
            ("one target alone", target_rate, 1e3 / target_rate),
            ("one drafter alone", drafter_rate, 1e3 / drafter_rate),
            (f"pipeline, {len(targets)} + {len(drafters)}", rate, 1e3 / rate),
            ("pipeline / " + ("time-shared bound" if colocated else "slower side"), rate / bound, ""),
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
    console.print(describe(outcome.workers))
    waits = (("idle process", idle_gil), ("pipeline", clock.gil))
    table(
        "wait for the GIL",
        [(name, wait["mean"], wait["p99"]) for name, wait in waits if wait is not None],
        "",
        "mean us",
        "99th percentile us",
    )
    console.print(f"recompiles after the start: {result['recompiles_after_start']}")
    table(
        "compiled",
        [(r["worker"], r["mode"], r["kernels"], r["graph_breaks"]) for r in compiled],
        "worker",
        "mode",
        "kernels",
        "graph breaks",
    )
    if clock.calls is not None:
        per_step = {name: clock.calls[name] / clock.profiled for name in (*SYNCHRONISING, *COUNTED)}
        result["cuda_calls_per_step"] = per_step
        result["host_synchronisations_per_step"] = sum(per_step[name] for name in SYNCHRONISING)
        table(
            f"CUDA runtime calls per step, all threads, {clock.profiled} steps profiled",
            [
                (name, count, "waits for the device" if name in SYNCHRONISING else "")
                for name, count in per_step.items()
            ],
            "call",
            "per step",
            "",
        )
    return result


# --------------------------------------------------------------------------------------------------------------- target


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


# -------------------------------------------------------------------------------------------------------------- threads


def threads(options: argparse.Namespace) -> dict[str, Any]:
    """Independent drafters on one device, one thread each."""
    device = torch.device(options.device)
    modes: tuple[Mode, ...] = ("compiled", "graph") if device.type == "cuda" else ("eager",)
    found: dict[str, Any] = {}
    rows, losses = [], {}
    for mode in modes:
        for count in (1, options.threads):
            console.print(f"measuring {mode}, {count} threads")
            rate, milliseconds, losses[mode, count] = _threads_trial(options, device, mode, count)
            found[f"{mode}_{count}_rows_per_second"] = rate
            rows.append((mode, count, milliseconds, rate))
    table("drafters on one device", rows, "mode", "threads", "step ms", "rows/s, all threads")
    if device.type == "cuda":
        found["graph_to_compiled"] = (
            found[f"graph_{options.threads}_rows_per_second"] / found[f"compiled_{options.threads}_rows_per_second"]
        )
        reference = losses["compiled", 1]
        found["losses_equal_to_the_last_bit"] = all(made == reference for made in losses.values())
        console.print(
            f"{options.threads} graph threads / {options.threads} compiled threads: {found['graph_to_compiled']:.2f}; "
            f"losses equal to the last bit: {found['losses_equal_to_the_last_bit']}"
        )
    return found


def _threads_trial(
    options: argparse.Namespace, device: torch.device, mode: Mode, count: int
) -> tuple[float, float, list[float]]:
    """Rows per second of all threads, milliseconds a step, and the first thread's losses."""
    preset: Preset = options.shape
    rows = rows_of(preset, 8, device)
    ready = threading.Barrier(count + 1)
    seconds = [0.0] * count
    losses: list[float] = []

    def work(number: int, phase: CompilePhase, stream: torch.cuda.Stream | None) -> None:
        step = drafter_step(options, device)
        generator = torch.Generator(device).manual_seed(1)
        features = [step.feature_buffers()[0].normal_(generator=generator) for _ in range(2)]
        with phase.turn(f"drafter {number}", device, stream) as turn:
            step.prepare(turn)
        results = [torch.empty_like(step.result) for _ in range(options.steps)]
        ready.wait()
        ready.wait()
        start = time.perf_counter()
        for k in range(options.steps):
            prepared = rows[k % len(rows)]
            step.load(prepared.row, features[k % 2], None)
            step.accumulate(prepared.valid_slots)
            step.update()
            results[k].copy_(step.result)
        if stream is not None:
            stream.synchronize()
        seconds[number] = time.perf_counter() - start
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
    slowest = max(seconds)
    return count * options.steps / slowest, 1e3 * slowest / options.steps, losses


# ----------------------------------------------------------------------------------------------------------------- step


def step(options: argparse.Namespace) -> dict[str, Any]:
    """One drafter step, all slots supervised, and its pieces."""
    preset: Preset = options.shape
    device = torch.device(options.device)

    def work(stream: torch.cuda.Stream | None) -> dict[str, Any]:
        made = drafter_step(options, device)
        prepared = rows_of(preset, 1, device)[0]
        features = made.feature_buffers()[0].normal_()
        with CompilePhase(options.mode) as phase:
            with phase.turn("drafter 0", device, stream) as turn:
                made.prepare(turn)
            phase.close()
            report = phase.reports[0]
            pieces = made.pieces()
            chunks = -(-prepared.valid_slots // made.chunk)
            times: dict[str, float] = {}
            for repeat in range(2 + options.steps):
                marks = [_mark(device)]
                made.load(prepared.row, features, None)
                marks.append(_mark(device))
                pieces["forward"]()
                marks.append(_mark(device))
                for _ in range(chunks):
                    pieces["chunk"]()
                marks.append(_mark(device))
                pieces["backward"]()
                marks.append(_mark(device))
                pieces["update"]()
                marks.append(_mark(device))
                synchronise(device)
                if repeat >= 2:
                    names = ("load", "forward", "chunks", "backward", "update")
                    for name, (one, other) in zip(names, pairwise(marks), strict=True):
                        times[name] = times.get(name, 0.0) + _between(one, other) / options.steps
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        return {
            "milliseconds": times,
            "step_milliseconds": sum(times.values()),
            "chunks": chunks,
            "valid_slots": prepared.valid_slots,
            "peak_gib": peak,
            "compilation": report,
        }

    console.print("measuring one step")
    found: dict[str, Any] = in_worker_thread(device, work)
    table(
        f"{options.preset}: {preset.length} tokens, {preset.anchors} anchors of {preset.block}, {options.mode}",
        [*found["milliseconds"].items(), ("step", found["step_milliseconds"])],
        "piece",
        "ms",
    )
    peak = f"; peak GPU memory {found['peak_gib']:.1f} GiB" if found["peak_gib"] is not None else ""
    made = found["compilation"]
    console.print(
        f"{wording.count(found['chunks'], 'head chunk')}{peak}; {made.mode}, {wording.count(made.kernels, 'kernel')}"
    )
    return found


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _between(one: Any, other: Any) -> float:
    """Milliseconds."""
    return float(1e3 * (other - one) if isinstance(one, float) else one.elapsed_time(other))


# ----------------------------------------------------------------------------------------------------------- first step


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
        "hits": sum(r["cache_hits"] for r in compiled),
        "misses": sum(r["cache_misses"] for r in compiled),
    }
