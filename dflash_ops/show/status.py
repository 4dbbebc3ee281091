"""Shows a run's status: unit, log, GPUs, progress; once or as a live view. Decides nothing.

Text from the container was made safe by `dflash_ops.text.visible` when it was read, and is never parsed as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_ops.run.probes.gpu import Device, GpuDevices, GpuNone, GpuReading, GpuUnknown, role_of
from dflash_ops.run.probes.log import LogFresh, LogGone, LogReading, LogSilent, LogUnknown
from dflash_ops.run.probes.snapshot import HeldOut, Progress
from dflash_ops.run.probes.unit import UnitAbsent, UnitEnded, UnitReading, UnitUnknown
from dflash_ops.run.record import GpuRoles
from dflash_ops.show.console import STATE_STYLES, console, mark
from dflash_ops.text import age, size, visible

if TYPE_CHECKING:
    from dflash_ops.run.status import Status

_BARS = "▁▂▃▄▅▆▇█"
_GPU_COLUMNS = ("GPU", "ROLE", "UTILISATION", "MEMORY", "POWER", "TEMP", "")  # the last one is a note
_LEAST_WANTED = ("TEMP", "POWER", "MEMORY", "ROLE")
_BAD = ("failed", "lost", "stalled")


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


def gpu_line(gpu: GpuReading, roles: GpuRoles | None = None) -> str:
    """What nvidia-smi says, in one line; with the roles of a run, also that it should see GPUs and does not."""
    match gpu:
        case GpuNone(reason=reason):
            line = f"none in this container{f' ({reason})' if reason else ''}"
            wanted = ", ".join(map(str, roles.all)) if roles is not None else ""
            return f"{line}, though the run uses GPU {wanted}" if wanted else line
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


class GpuTable:
    """One row a GPU, those of the run first, by role. Columns that do not fit are left out whole, and `…` says so."""

    def __init__(self, gpu: GpuDevices, roles: GpuRoles) -> None:
        order = sorted(gpu.devices, key=lambda device: (not role_of(device.index, roles), device.index))
        self._rows = [dict(zip(_GPU_COLUMNS, _gpu_row(device, roles), strict=True)) for device in order]
        self._styles = ["" if role_of(device.index, roles) or not roles.all else "dim" for device in order]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(_GPU_COLUMNS)
        for name in _LEAST_WANTED:
            if sum(map(self._width, shown)) - 2 > options.max_width:
                shown.remove(name)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in shown:
            missing = not name and len(shown) < len(_GPU_COLUMNS)
            table.add_column("…" if missing else name, no_wrap=bool(name), overflow="fold")
        for row, style in zip(self._rows, self._styles, strict=True):
            table.add_row(*(row[name] for name in shown), style=style)
        yield table

    def _width(self, name: str) -> int:
        """Of a column with its gap; a note may be folded between its words."""
        cells = [str(row[name]) for row in self._rows]
        return 2 + max(map(cell_len, ["…", name, *(cells if name else " ".join(cells).split())]))


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


def held_out_line(held_out: HeldOut) -> str:
    """`loss 2.310  accepts 2.41  at step 200`, as far as the trainer wrote it."""
    loss = "" if held_out.loss is None else f"loss {held_out.loss:.3f}  "
    accepts = "" if held_out.accept_length is None else f"accepts {held_out.accept_length:.2f}  "
    return f"{loss}{accepts}at step {held_out.step}"


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
    missing = isinstance(status.gpu, GpuNone) and bool(status.roles.all) and not over
    table.add_row("gpu", mark("no" if missing else status.gpu.answer), Text(gpu_line(status.gpu, status.roles)))
    if status.progress is not None:
        table.add_row("step", "", progress_line(status.progress, over=over))
        if status.progress.held_out is not None:
            table.add_row("held out", "", Text(held_out_line(status.progress.held_out)))
        workers = _workers_line(status.progress)
        if workers:
            table.add_row("busy", "", Text(workers))
    for worker in status.compiled:
        if worker.note:
            table.add_row("slower", mark("none" if worker.allowed_by else "no"), Text(worker.fallback))
    if status.checkpoint is not None:
        since = age(status.now.epoch - status.checkpoint.time)
        table.add_row("saved", "", Text(f"{status.checkpoint.name}, {since} ago"))
    if status.asked is not None:
        asked = status.asked
        resumed = f", from {asked.resumed_from}" if asked.resumed_from else ""
        since = age(status.now.epoch - asked.launched.epoch)
        where = f"{asked.job} on {status.container}, launched {since} ago by {asked.launched_by}{resumed}"
        table.add_row("job", "", Text(where))
    if status.disk is not None and (status.disk.full or status.disk.free < 0.05 * status.disk.total):
        table.add_row("disk", mark("no"), Text(f"{size(status.disk.free)} of {size(status.disk.total)} free"))
    for name in status.unreadable:
        table.add_row("record", mark("unknown"), Text(f"{name} is damaged"))
    parts: list[RenderableType] = [head, table]
    if isinstance(status.gpu, GpuDevices):
        parts.append(GpuTable(status.gpu, status.roles))
    shown = (12 if status.state in _BAD else 0) if lines is None else lines
    if shown and isinstance(status.log, LogFresh | LogSilent) and status.log.lines:
        parts.append(Text("\n".join(f"  │ {line}" for line in status.log.lines[-shown:]), style="dim"))
    return Group(*parts)


def show_status(status: Status) -> None:
    """Print it."""
    console().print(status_view(status))


def show_watch(statuses: Iterator[Status]) -> Status:
    """Redraw each status in place until the run is over or Ctrl-C. Returns the last one."""
    screen = console()
    last: Status | None = None
    try:
        with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
            for last in statuses:
                foot = Text(f"{last.now.utc}; curves: dflash report --serve {last.run}", style="dim")
                live.update(Group(status_view(last, lines=6), foot), refresh=True)
    except KeyboardInterrupt:
        if last is None:
            raise
    assert last is not None  # the iterator yields or raises
    return last
