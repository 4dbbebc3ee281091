"""Reads what a run wrote into the series that the report draws."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.text import visible

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class GpuSample:
    """A GPU at a moment, as nvidia-smi answered."""

    time: float
    index: int
    utilization: float | None
    power: float | None


@dataclass
class RunData:
    """What is known of one run. Steps are in order, each once."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    gpu: list[GpuSample] = field(default_factory=list)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    spec: dict[str, Any] | None = None
    facts: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Series:
    """One curve."""

    label: str
    points: Points


@dataclass(frozen=True)
class Plot:
    """A diagram with at least one point in each series."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    note: str = ""


def read_run(name: str, files: Mapping[str, str], gpu: Iterable[GpuSample] = ()) -> RunData:
    """A run from the texts of its files, by name. What is damaged or missing becomes a note, not an error."""
    run = RunData(visible(name, 100), gpu=list(gpu))
    _read_metrics(run, files.get("metrics.jsonl", ""))
    compiled = _document(run, files, "compile.json")
    if isinstance(compiled, list):
        run.compiled = [one for one in compiled if isinstance(one, dict)]
    spec, facts = _document(run, files, "spec.json"), _document(run, files, "facts.json")
    run.spec = spec if isinstance(spec, dict) else None
    run.facts = facts if isinstance(facts, dict) else None
    for file in sorted(files):
        if file not in ("compile.json", "spec.json", "facts.json", "metrics.jsonl"):
            found = _document(run, files, file)
            if isinstance(found, dict) and isinstance(found.get("sets"), list):
                run.evaluations[visible(file, 100)] = found
    if not run.steps:
        run.notes.append("no step was written yet")
    return run


def _read_metrics(run: RunData, text: str) -> None:
    steps: dict[int, dict[str, Any]] = {}  # a resumed run writes some steps again: the later line holds
    held_out: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind, step = record.get("kind"), record.get("step")
        except (ValueError, AttributeError, RecursionError):
            damaged += 1
            continue
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53:
            if kind == "step":
                steps[step] = record
            elif kind == "held_out":
                held_out[step] = record
    run.steps = [steps[step] for step in sorted(steps)]
    run.held_out = [held_out[step] for step in sorted(held_out)]
    if damaged:
        run.notes.append(f"{damaged} lines of metrics.jsonl could not be read")


def _document(run: RunData, files: Mapping[str, str], name: str) -> Any:
    if name not in files:
        return None
    try:
        return json.loads(files[name])
    except (ValueError, RecursionError):
        run.notes.append(f"{visible(name, 100)} is damaged")
        return None


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) < 1e300 else None


def plots(runs: list[RunData]) -> tuple[list[Plot], list[str]]:
    """Every diagram that has points, and one line for each that has none."""
    found: list[Plot] = []
    missing: list[str] = []

    def add(title: str, x: str, y: str, series: list[Series], absent: str, note: str = "") -> None:
        drawn = tuple(one for one in series if one.points)
        if drawn:
            found.append(Plot(title, x, y, drawn, note))
        else:
            missing.append(f"{title}: {absent}")

    steps = "no step was written"
    for title, y, key in (
        ("Loss", "loss", "loss"),
        ("Expected accepted length", "tokens a pass", "accept_length"),
        ("Learning rate", "learning rate", "lr"),
        ("Speed", "tokens/s", "tokens_per_second"),
    ):
        add(
            title,
            "step",
            y,
            [Series(run.name, _by_step(run.steps, _key(key))) for run in runs],
            steps,
        )
    several = len(runs) > 1
    add("Accuracy of each slot", "step", "share right", _each(runs, several, _slots), "no step has slot_accuracy")
    add(
        "Slots at the last step",
        "slot",
        "share right",
        [Series(run.name, _last_slots(run)) for run in runs],
        "no step has slot_accuracy",
    )
    add("Busy workers", "step", "share of time", _each(runs, several, _busy), "no step names its workers")
    add(
        "Held-out loss",
        "step",
        "loss",
        [Series(run.name, _by_step(run.held_out, _key("loss"))) for run in runs],
        "the run measures no held-out rows",
    )
    add(
        "Held-out accepted length",
        "step",
        "tokens a pass",
        [Series(run.name, _by_step(run.held_out, _key("accept_length"))) for run in runs],
        "the run measures no held-out rows",
    )
    why = "a run keeps no samples of its GPUs; `dflash report --serve` takes them while it looks"
    add("GPU use", "minutes", "percent", _each(runs, several, lambda run: _gpu(run, "utilization")), why)
    add("GPU power", "minutes", "W", _each(runs, several, lambda run: _gpu(run, "power")), why)
    return found, missing


def _key(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda record: record.get(name)


def _by_step(records: Iterable[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], Any]) -> Points:
    pairs = ((float(one["step"]), number(value(one))) for one in records)
    return [(step, y) for step, y in pairs if y is not None]


def _each(runs: list[RunData], several: bool, series: Callable[[RunData], dict[str, Points]]) -> list[Series]:
    """The curves of every run, which are named by it when there are several."""
    return [
        Series(f"{run.name}: {label}" if several else label, points)
        for run in runs
        for label, points in series(run).items()
    ]


def _slot_values(record: Mapping[str, Any]) -> list[Any]:
    values = record.get("slot_accuracy")
    return values if isinstance(values, list) else []


def _slots(run: RunData) -> dict[str, Points]:
    """The first, second, fourth, eighth … slot: more curves can't be told apart."""
    count = max((len(_slot_values(one)) for one in run.steps), default=0)
    chosen = [slot for slot in (1, 2, 4, 8, 16, 32) if slot <= count]

    def of(slot: int) -> Callable[[Mapping[str, Any]], Any]:
        return lambda one: _slot_values(one)[slot - 1] if len(_slot_values(one)) >= slot else None

    return {f"slot {slot}": _by_step(run.steps, of(slot)) for slot in chosen}


def _last_slots(run: RunData) -> Points:
    values = _slot_values(run.steps[-1]) if run.steps else []
    pairs = ((float(slot), number(value)) for slot, value in enumerate(values, start=1))
    return [(slot, y) for slot, y in pairs if y is not None]


def _busy(run: RunData) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for one in run.steps:
        workers = one.get("workers")
        for name, worker in workers.items() if isinstance(workers, dict) else ():
            share = number(worker.get("busy")) if isinstance(worker, dict) else None
            if share is not None:
                found.setdefault(visible(name, 40), []).append((float(one["step"]), share))
    return found


def _gpu(run: RunData, field_name: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    first = min((sample.time for sample in run.gpu), default=0.0)
    for sample in run.gpu:
        value = getattr(sample, field_name)
        if value is not None:
            found.setdefault(f"GPU {sample.index}", []).append(((sample.time - first) / 60, value))
    return found
