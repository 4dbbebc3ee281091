"""Shows the answers that are tables: runs, diff and doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_ops.show.console import STATE_STYLES, console, mark
from dflash_ops.text import age

if TYPE_CHECKING:
    from dflash_ops.run.status import Status
    from dflash_ops.verbs.candidates import Initialized
    from dflash_ops.verbs.diff import Comparison
    from dflash_ops.verbs.doctor import Diagnosis
    from dflash_ops.verbs.runs import Runs


_COLUMNS = ("RUN", "STATE", "UNIT", "LOG", "GPU", "STEP", "LOSS", "AGE", "REASON")
_LEAST_REASON = 20  # columns of a reason that say something


def runs_view(answer: Runs, width: int) -> RenderableType:
    """One row a run; where the rows would not fit into `width` columns, a few lines a run. No figure is ever cut."""
    rows = [_cells(run) for run in answer.runs]
    longest = [max(map(cell_len, (name, *(row[name].plain for row in rows)))) for name in _COLUMNS]
    longest[-1] = min(longest[-1], _LEAST_REASON)
    if sum(longest) + 2 * (len(longest) - 1) > width:
        return Group(*(_block(row) for row in rows))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True)
    for row in rows:
        # A line a run: what is cut off here, `dflash status` says.
        row["REASON"].no_wrap, row["REASON"].overflow = True, "ellipsis"
        table.add_row(*row.values())
    return table


def _cells(run: Status) -> dict[str, Text]:
    """What is said of a run, by column."""
    done = run.verdict.finished
    last = run.progress.last if run.progress is not None else None
    marks = [Text("")] * 3 if done else [mark(probe.answer) for probe in (run.unit, run.log, run.gpu)]
    begun = run.asked.launched.epoch if run.asked is not None else None
    cells = (
        Text(run.run),
        Text(run.state, style=STATE_STYLES[run.state]),
        *marks,
        Text(last.of_total if last is not None else ""),
        Text(f"{last.loss:.3f}" if last is not None and last.loss is not None else ""),
        Text("" if begun is None else age(run.now.epoch - begun)),
        Text(run.reason, style="dim" if done else ""),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _block(row: dict[str, Text]) -> Text:
    """A run on lines of its own: its name, what is known of it, and the reason."""
    lines = [row["RUN"]]
    facts = [
        row["STATE"],
        *(Text.assemble((name.lower(), "dim"), " ", row[name]) for name in _COLUMNS[2:-1] if row[name]),
    ]
    lines.append(Text("  ").join(facts))
    lines.append(row["REASON"])
    return Text("\n  ", overflow="fold").join(line for line in lines if line)


def show_runs(answer: Runs) -> None:
    """Print it."""
    screen = console()
    if not answer.runs:
        screen.print(f"no run on {answer.container} yet; `dflash launch` starts one")
        return
    screen.print(runs_view(answer, screen.width))
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
