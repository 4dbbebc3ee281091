"""How do the answers look? Rich renderables of the verbs' models; nothing is decided here.

Text from the container was made safe by `dflash_ops.text.visible` when it was read, and is never parsed as markup.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as BarProgress
from rich.table import Table
from rich.text import Text

from dflash_ops.probes.gpu import Device, GpuDevices, GpuNone, GpuReading, GpuUnknown, role_of
from dflash_ops.probes.log import LogFresh, LogGone, LogReading, LogSilent, LogUnknown
from dflash_ops.probes.snapshot import Progress
from dflash_ops.probes.unit import UnitAbsent, UnitEnded, UnitReading, UnitUnknown
from dflash_ops.pull import Progress as PullProgress
from dflash_ops.run import GpuRoles
from dflash_ops.text import age, size, visible

if TYPE_CHECKING:
    from dflash_ops.checkpoint import Saved
    from dflash_ops.diff import Comparison
    from dflash_ops.doctor import Diagnosis
    from dflash_ops.pull import Pulled
    from dflash_ops.report import Status
    from dflash_ops.runs import Runs
    from dflash_ops.wait import Waited

_BARS = "▁▂▃▄▅▆▇█"
_MARKS = {"yes": ("✓", "green"), "no": ("×", "red"), "unknown": ("?", "yellow"), "none": ("–", "dim")}
STATE_STYLES = {
    "starting": "cyan",
    "running": "bold green",
    "busy-quiet": "green",
    "stalled": "bold yellow",
    "stopping": "cyan",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "dim",
    "lost": "red",
    "unknown": "yellow",
}
_BAD = ("failed", "lost", "stalled")


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """See rich. Where nobody looks at columns, lines end where their text does."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        for line in captured.get().removesuffix("\n").split("\n"):
            print(line.rstrip())

    def on_broken_pipe(self) -> None:
        """The command line ends it, as it does for all that is printed otherwise."""
        raise BrokenPipeError


def console() -> Console:
    """Where answers go. Piped output is not wrapped: a line stays a line for grep."""
    return _Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 1000)


def sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """A series as bars from its smallest to its largest value; means of equal slices when it is longer than `width`."""
    series = [value for value in values if value is not None and math.isfinite(value)]
    if not series:
        return ""
    count = min(width, len(series))
    slices = [series[len(series) * i // count : len(series) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in slices]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def count(value: float) -> str:
    """A rate or a count in at most four characters: `940`, `4.3k`, `1.2M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}" if value < 100 * limit else f"{value / limit:.0f}{unit}"
    return f"{value:.0f}"


def mark(answer: str) -> Text:
    """A probe's answer as a glyph."""
    glyph, style = _MARKS[answer]
    return Text(glyph, style=style)


def unit_line(unit: UnitReading) -> str:
    """What systemd says."""
    match unit:
        case UnitUnknown(reason=reason):
            return reason
        case UnitAbsent():
            return "systemd does not know it"
        case UnitEnded(ending=ending):
            return ending.describe()
        case _:
            parts = [f"{unit.kind} for {age(unit.seconds)}" if unit.seconds is not None else unit.kind]
            parts.append(f"PID {unit.main_pid}")
            if unit.memory is not None:
                parts.append(size(unit.memory))
            if unit.watchdog_age is not None:
                parts.append(f"watchdog fed {age(unit.watchdog_age)} ago")
            line = ", ".join(parts)
            return f"{line}: {unit.status_text}" if unit.status_text else line


def log_line(log: LogReading) -> str:
    """What the log says."""
    match log:
        case LogFresh() | LogSilent():
            return f"{size(log.size)}, last written {age(log.age)} ago"
        case LogGone():
            return "there is no log file"
        case LogUnknown(reason=reason):
            return reason


def gpu_line(gpu: GpuReading) -> str:
    """What nvidia-smi says, in one line."""
    match gpu:
        case GpuNone():
            return "none in this container"
        case GpuUnknown(reason=reason, cure=cure):
            return f"{reason} ({cure})" if cure else reason
        case GpuDevices(devices=devices):
            names = ", ".join(sorted({device.name for device in devices}))
            absent = f"; {len(gpu.absent)} unreadable: {gpu.absent[0]}" if gpu.absent else ""
            return f"{len(devices)} × {names}{absent}"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _gpu_row(device: Device, roles: GpuRoles) -> tuple[str | Text, ...]:
    used = "–" if device.utilization is None else f"{device.utilization:3d} % {_gauge(device.utilization / 100)}"
    memory = "–"
    if device.memory_used is not None and device.memory_total:
        memory = f"{device.memory_used / 1024:.1f}/{device.memory_total / 1024:.0f} GiB"
    power = _or_dash(device.power, "{:.0f}") + "/" + _or_dash(device.power_limit, "{:.0f} W")
    note = device.fault or ("spinning" if device.spins else "MIG" if device.mig else "")
    temperature = _or_dash(device.temperature, "{} °C")
    style = "yellow" if note and note != "MIG" else ""
    return (str(device.index), role_of(device.index, roles) or "–", used, memory, power, temperature, Text(note, style))


def _gauge(share: float, width: int = 10) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def gpu_table(gpu: GpuDevices, roles: GpuRoles) -> Table:
    """One row a GPU, those of the run first, by role."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("GPU", "ROLE", "UTILISATION", "MEMORY", "POWER", "TEMP", ""):
        table.add_column(name)
    order = sorted(gpu.devices, key=lambda device: (not role_of(device.index, roles), device.index))
    for device in order:
        table.add_row(*_gpu_row(device, roles), style="" if role_of(device.index, roles) or not roles.all else "dim")
    return table


def progress_line(progress: Progress, *, over: bool) -> Text:
    """Steps, loss with its history, accepted length, speed, and the time left unless it is over."""
    last = progress.last
    line = Text(last.of_total)
    if last.total_steps:
        line.append(f" {_gauge(last.step / last.total_steps)}")
    if last.loss is not None:
        line.append(f"  loss {last.loss:.3f} ")
        line.append(sparkline([step.loss for step in progress.history]), style="cyan")
    if last.accept_length is not None:
        line.append(f"  accepts {last.accept_length:.2f}")
    if last.tokens_per_second is not None:
        line.append(f"  {count(last.tokens_per_second)} tok/s")
    if not over and progress.remaining is not None and last.total_steps and last.step < last.total_steps:
        line.append(f"  {age(progress.remaining)} left")
    return line


def _workers_line(progress: Progress) -> str:
    """`target 0 98 % busy, drafter 0 44 %; bottleneck: targets`, as far as the trainer reports it."""
    shares = [
        f"{visible(name, 40)} {found['busy']:.0%}"
        for name, found in progress.last.workers.items()
        if isinstance(found, dict) and isinstance(found.get("busy"), int | float)
    ]
    balance = progress.last.workers.get("balance")
    slower = balance.get("bottleneck") if isinstance(balance, dict) else None
    return ", ".join(shares) + (f"; bottleneck: {visible(str(slower), 40)}" if slower else "")


def status_view(status: Status, *, lines: int | None = None) -> RenderableType:
    """The whole answer. `lines`: how much of the log's end to show; None: some when something is wrong."""
    head = Text("● ", style=STATE_STYLES[status.state])
    head.append(status.run, style="bold")
    head.append(f"  {status.state}", style=STATE_STYLES[status.state])
    if status.reason:
        head.append(f": {status.reason}")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(width=1)
    table.add_column(overflow="fold")
    over = status.verdict.finished  # then a unit that is gone and a log that is silent are as they should be
    table.add_row("unit", mark("none" if over else status.unit.answer), Text(unit_line(status.unit)))
    table.add_row("log", mark("none" if over else status.log.answer), Text(log_line(status.log)))
    table.add_row("gpu", mark(status.gpu.answer), Text(gpu_line(status.gpu)))
    if status.progress is not None:
        table.add_row("step", "", progress_line(status.progress, over=over))
        workers = _workers_line(status.progress)
        if workers:
            table.add_row("busy", "", Text(workers))
    if status.checkpoint is not None:
        since = age(status.now.epoch - status.checkpoint.time)
        table.add_row("saved", "", Text(f"{status.checkpoint.name}, {since} ago"))
    if status.asked is not None:
        asked = status.asked
        resumed = f", from {asked.resumed_from}" if asked.resumed_from else ""
        since = age(status.now.epoch - asked.launched.epoch)
        where = f"{asked.job} on {status.target}, launched {since} ago by {asked.launched_by}{resumed}"
        table.add_row("job", "", Text(where))
    if status.disk is not None and (status.disk.full or status.disk.free < 0.05 * status.disk.total):
        table.add_row("disk", mark("no"), Text(f"{size(status.disk.free)} of {size(status.disk.total)} free"))
    for name in status.unreadable:
        table.add_row("record", mark("unknown"), Text(f"{name} is damaged"))
    parts: list[RenderableType] = [head, table]
    if isinstance(status.gpu, GpuDevices):
        parts.append(gpu_table(status.gpu, status.roles))
    shown = (12 if status.state in _BAD else 0) if lines is None else lines
    if shown and isinstance(status.log, LogFresh | LogSilent) and status.log.lines:
        parts.append(Text("\n".join(f"  │ {line}" for line in status.log.lines[-shown:]), style="dim"))
    return Group(*parts)


def show_status(status: Status) -> None:
    """Print it."""
    console().print(status_view(status))


def verdict_line(status: Status) -> str:
    """`run r7 failed: exit 1 after 2m (CUDA out of memory)`."""
    return f"run {status.run} {status.state}" + (f": {status.reason}" if status.reason else "")


def runs_table(answer: Runs) -> Table:
    """One row a run."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("RUN", "STATE", "UNIT", "LOG", "GPU", "STEP", "LOSS", "AGE", "REASON"):
        table.add_column(name, no_wrap=name != "REASON", overflow="fold")
    for run in answer.runs:
        done = run.verdict.finished
        step, loss = "", ""
        if run.progress is not None:
            last = run.progress.last
            step = last.of_total
            loss = "" if last.loss is None else f"{last.loss:.3f}"
        marks = [Text("")] * 3 if done else [mark(probe.answer) for probe in (run.unit, run.log, run.gpu)]
        begun = run.asked.launched.epoch if run.asked is not None else None
        since = "" if begun is None else age(run.now.epoch - begun)
        state = Text(run.state, style=STATE_STYLES[run.state])
        # A line a run: what is cut off here, `dflash status` says.
        reason = Text(run.reason, style="dim" if done else "", no_wrap=True, overflow="ellipsis")
        table.add_row(run.run, state, *marks, step, loss, since, reason)
    return table


def show_runs(answer: Runs) -> None:
    """Print it."""
    screen = console()
    if not answer.runs:
        screen.print(f"no run on {answer.target} yet; `dflash launch` starts one")
        return
    screen.print(runs_table(answer))
    if answer.total > len(answer.runs):
        screen.print(Text(f"{answer.total - len(answer.runs)} older not shown (-n shows more)", style="dim"))


def show_waited(answer: Waited) -> None:
    """Print it."""
    goal = {"started": "is running", "step": "has done its first step", "finished": "succeeded"}[answer.goal]
    took = f"(waited {age(answer.seconds)})"
    if answer.reached:
        console().print(f"run {answer.status.run} {goal} {took}")
    else:
        console().print(f"{verdict_line(answer.status)} {took}")


def show_saved(answer: Saved) -> None:
    """Print it."""
    console().print(
        f"run {answer.run} saved {answer.checkpoint.name} (step {answer.checkpoint.step}) in {answer.seconds:.1f} s"
    )


def show_pulled(answer: Pulled) -> None:
    """Print it."""
    screen = console()
    for path in answer.files:
        screen.print(f"{answer.folder}/{path}")
    for name in answer.kept:
        screen.print(f"{answer.folder}/checkpoints/{name} was already here")
    for name in answer.vanished:
        screen.print(f"{name} was deleted by the trainer while it was pulled (checkpoint.keep_last says how many stay)")
    for name in answer.refused:
        screen.print(f"left out because of its name: {name}")


class _Bar(PullProgress):
    """A bar on stderr."""

    def __init__(self, bar: BarProgress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def total(self, size: int, done: int) -> None:
        self._bar.reset(self._task, total=size, completed=done)

    def file(self, path: str) -> None:
        self._bar.update(self._task, description=path[-40:])

    def advance(self, size: int) -> None:
        self._bar.advance(self._task, size)


@contextmanager
def pull_progress() -> Iterator[PullProgress]:
    """A progress bar, where stderr is a terminal."""
    err = Console(stderr=True, highlight=False, markup=False)
    if not err.is_terminal:
        yield PullProgress()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with BarProgress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        yield _Bar(bar)


_LEVELS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("×", "bold red"), "unknown": ("?", "yellow")}


def show_diagnosis(answer: Diagnosis) -> None:
    """One statement a line, the cure below it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=1)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for line in answer.lines:
        glyph, style = _LEVELS[line.level]
        table.add_row(Text(glyph, style=style), line.topic, Text(line.text))
        if line.cure is not None and line.level != "ok":
            table.add_row("", "", Text(f"→ {line.cure}", style="cyan"))
    screen = console()
    screen.print(table)
    counts = {level: sum(line.level == level for line in answer.lines) for level in ("fail", "warn", "unknown")}
    said = ", ".join(f"{many} {level}" for level, many in counts.items() if many)
    screen.print(f"{answer.target}: {said or 'all is well'}")


def show_comparison(answer: Comparison) -> None:
    """What differs, by section; the code as a unified diff."""
    screen = console()
    if answer.same:
        screen.print(f"{answer.a} and {answer.b} do not differ")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "", answer.a, answer.b):
        table.add_column(name, overflow="fold")
    last = ""
    for one in answer.differences:
        section = one.section if one.section != last else ""
        last = one.section
        cells = [Text("–", style="dim") if value is None else Text(value) for value in (one.a, one.b)]
        table.add_row(Text(section, style="bold"), Text(one.key), *cells)
    if answer.differences:
        screen.print(table)
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for file in answer.code:
        screen.print(Text(file.path, style="bold"))
        for row in file.diff.splitlines():
            screen.print(Text(row, style=styles.get(row[:1], "")))
    for line in answer.incomplete:
        screen.print(Text(f"not compared: {line}", style="yellow"))


def show_watch(statuses: Iterator[Status]) -> Status:
    """Redraw each status in place until the run is over or Ctrl-C. Returns the last one."""
    screen = console()
    last: Status | None = None
    try:
        with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
            for last in statuses:
                live.update(Group(status_view(last, lines=6), Text(last.now.utc, style="dim")), refresh=True)
    except KeyboardInterrupt:
        if last is None:
            raise
    assert last is not None  # the iterator yields or raises
    return last
