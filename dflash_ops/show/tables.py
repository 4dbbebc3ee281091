"""Shows the answers that are tables: runs, diff and doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from dflash_ops.show.console import STATE_STYLES, console, mark
from dflash_ops.text import age

if TYPE_CHECKING:
    from dflash_ops.verbs.candidates import Initialized
    from dflash_ops.verbs.diff import Comparison
    from dflash_ops.verbs.doctor import Diagnosis
    from dflash_ops.verbs.runs import Runs


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
        screen.print(f"no run on {answer.container} yet; `dflash launch` starts one")
        return
    screen.print(runs_table(answer))
    if answer.total > len(answer.runs):
        screen.print(Text(f"{answer.total - len(answer.runs)} older not shown (-n shows more)", style="dim"))


_LEVELS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("×", "bold red"), "unknown": ("?", "yellow")}


def show_doctor(answer: Diagnosis) -> None:
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
    screen.print(f"{answer.container}: {said or 'all is well'}")


def show_init(answer: Initialized) -> None:
    """What was written, and what doctor says of each container."""
    for name in answer.added:
        print(f"{answer.inventory}: {name}")
    if not answer.added:
        print(f"{answer.inventory} had all of it already")
    for diagnosis in answer.doctor:
        print(f"\n{diagnosis.container}")
        show_doctor(diagnosis)


def show_diff(answer: Comparison) -> None:
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
