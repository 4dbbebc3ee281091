"""Puts diagrams and tables together to one HTML page without scripts that asks nothing of any network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dflash_ops.show.report.data import Plot, RunData, number, plots
from dflash_ops.show.report.svg import COLOURS, LARGEST_SERIES, draw
from dflash_ops.text import visible

_LIGHT = ["#0b62c4", "#c2410c", "#15803d", "#a21caf", "#b91c1c", "#0e7490", "#854d0e", "#4b5563"]
_DARK = ["#6cb2ff", "#fb923c", "#4ade80", "#e879f9", "#f87171", "#22d3ee", "#facc15", "#cbd5e1"]
_DARK_REST = "--ink:#d4d4d8;--grid:#3f3f46;--page:#18181b;--card:#212125;"


def _variables(colours: list[str], rest: str) -> str:
    return "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours)) + rest


_CSS = f"""
:root{{color-scheme:light dark;{_variables(_LIGHT, "--ink:#333;--grid:#ddd;--page:#fff;--card:#f7f7f8;")}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK, _DARK_REST)}}}}}
@media print{{:root{{color-scheme:light;{_variables(_LIGHT, "--ink:#000;--grid:#ccc;--page:#fff;--card:#fff;")}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1400px;padding:16px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}}
h1{{font-size:22px}} h2{{font-size:18px;margin:28px 0 8px}} h3{{font-size:15px;margin:0 0 6px}}
.plots{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:14px}}
figure{{margin:0;padding:10px;background:var(--card);border:1px solid var(--grid);border-radius:6px;min-width:0;
break-inside:avoid}}
figure svg{{display:block;width:100%;height:auto}}
figcaption,.legend{{font-size:13px}} .legend{{display:flex;flex-wrap:wrap;gap:2px 12px;margin-top:4px}}
.legend svg{{display:inline-block;width:22px;height:8px;margin-right:4px;vertical-align:middle}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:13px}}
th,td{{text-align:left;vertical-align:top;padding:3px 10px 3px 0;border-bottom:1px solid var(--grid)}}
th{{white-space:nowrap}} td{{overflow-wrap:break-word}} td:last-child{{overflow-wrap:anywhere;min-width:110px}}
@media print{{body{{padding:0;font-size:11px}} .wide{{overflow:visible}} td{{overflow-wrap:anywhere}}
.plots{{grid-template-columns:1fr 1fr}}}}
"""


def page(
    runs: list[RunData],
    differences: Sequence[tuple[str, str, str, str | None, str | None]],
    made: str,
    refresh: int | None = None,
) -> str:
    """The page. `differences`: (the other run, section, key, the first run's value, the other's)."""
    drawn, missing = plots(runs)
    names = ", ".join(run.name for run in runs)
    head = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        ' img-src data:">',
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">',
        f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "",
        f"<title>{escape(names)}</title><style>{_CSS}</style></head><body>",
    ]
    body = [
        f"<h1>{escape(names)}</h1><p>Made {escape(made)}.</p>",
        _summary(runs),
        '<h2>Curves</h2><div class="plots">',
    ]
    body += [_figure(plot, f"p{index}") for index, plot in enumerate(drawn)]
    body.append("</div>")
    if missing:
        body.append("<h2>Not drawn</h2>" + _list(missing))
    body.append("<h2>Evaluation</h2>" + _evaluations(runs))
    body.append("<h2>Compile report</h2>" + _compiled(runs))
    if len(runs) > 1:
        rows = [[other, section, key, _or_dash(a), _or_dash(b)] for other, section, key, a, b in differences]
        table = _table(["run", "section", "what", runs[0].name, "the run"], rows) if rows else "<p>No difference.</p>"
        body.append(f"<h2>What differs from {escape(runs[0].name)}</h2>{table}")
    for title, attribute in (("Facts", "facts"), ("What was asked", "spec")):
        for run in runs:
            found = getattr(run, attribute)
            rows = [[key, value] for key, value in _flat(found)] if found else []
            content = _table(["what", "value"], rows) if rows else f"<p>The run has no {attribute}.json.</p>"
            body.append(f"<h2>{title}: {escape(run.name)}</h2>{content}")
    return "\n".join([*head, *body, "</body></html>\n"])


def _summary(runs: list[RunData]) -> str:
    rows = []
    for run in runs:
        last: Mapping[str, Any] = run.steps[-1] if run.steps else {}
        total = last.get("total_steps")
        steps = f"{last['step']} of {total}" if last and total else str(last.get("step", "–"))
        figures = [_figures(last.get(key)) for key in ("loss", "accept_length", "tokens_per_second")]
        rows.append([run.name, steps, *figures, "; ".join(run.notes) or "–"])
    return _table(["run", "step", "loss", "accepted length", "tokens/s", "notes"], rows)


def _figure(plot: Plot, prefix: str) -> str:
    legend = "".join(
        f'<span><svg viewBox="0 0 22 8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" stroke-width="2.5" '
        f'style="stroke:var(--c{index % COLOURS})"{_dash(index)}/></svg>{escape(series.label)}</span>'
        for index, series in enumerate(plot.series[:LARGEST_SERIES])
    )
    left_out = len(plot.series) - LARGEST_SERIES
    notes = [plot.note] if plot.note else []
    notes += [f"{left_out} more curves are not drawn"] if left_out > 0 else []
    caption = f"<figcaption>{escape('; '.join(notes))}</figcaption>" if notes else ""
    drawing = draw(plot, prefix)
    return f'<figure><h3>{escape(plot.title)}</h3>{drawing}<div class="legend">{legend}</div>{caption}</figure>'


def _dash(index: int) -> str:
    return (f' stroke-dasharray="{("", "5 3", "2 2")[index // COLOURS % 3]}"') if index >= COLOURS else ""


def _evaluations(runs: list[RunData]) -> str:
    rows = [
        [
            run.name,
            file,
            *(_cell(one.get(key)) for key in ("name", "answers", "acceptance_length", "speedup", "identical")),
        ]
        for run in runs
        for file, document in run.evaluations.items()
        for one in document["sets"]
        if isinstance(one, dict)
    ]
    names = ["run", "file", "set", "answers", "accepted length", "speed-up", "identical"]
    return _table(names, rows) if rows else "<p>The folder of the run holds no evaluation.</p>"


def _compiled(runs: list[RunData]) -> str:
    keys = [
        "worker",
        "device",
        "mode",
        "kernels",
        "graph_breaks",
        "recompiles",
        "cache_hits",
        "cache_misses",
        "seconds",
    ]
    keys += ["note", "allowed_by"]
    rows = [[run.name, *(_cell(one.get(key)) for key in keys)] for run in runs for one in run.compiled]
    names = ["run", *(key.replace("_", " ") for key in keys)]
    return _table(names, rows) if rows else "<p>The run has no compile.json.</p>"


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield visible(prefix, 200), _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return visible(value, 500) or "–"
    if isinstance(value, float):
        return _figures(value)
    return "–" if value is None else visible(json.dumps(value), 500)


def _figures(value: Any) -> str:
    found = number(value)
    return "–" if found is None else f"{found:,.4g}" if abs(found) < 1e4 else f"{found:,.0f}"


def _or_dash(value: str | None) -> str:
    return "–" if value is None else value


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
