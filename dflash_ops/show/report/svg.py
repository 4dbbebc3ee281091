"""Draws a diagram as SVG whose colours are CSS variables, so that one drawing serves light, dark and paper."""

from __future__ import annotations

import io
import re

from dflash_ops.errors import ConfigurationError
from dflash_ops.show.report.data import Plot, Points

COLOURS = 8  # then they repeat, dashed
LARGEST_SERIES = 16
_LARGEST_POINTS = 600
_DASHES = ("-", "--", ":")
_INK, _GRID = "#010203", "#010204"  # stand-ins for variables: no drawing uses these colours otherwise
_LINES = [f"#0102{16 + index:02x}" for index in range(COLOURS)]


def thinned(points: Points) -> Points:
    """At most some hundred of the points, evenly taken, the last one among them."""
    every = -(-len(points) // _LARGEST_POINTS)
    if every <= 1:
        return points
    kept = points[::every]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def draw(plot: Plot, prefix: str) -> str:
    """The `<svg>` element; its ids begin with `prefix`. Raises ConfigurationError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigurationError(
            "`dflash report` draws by matplotlib, which is not installed here", "pip install 'dflash-ops[report]'"
        ) from error
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",  # text stays text: small, searchable
            "svg.hashsalt": prefix,
            "font.size": 8,
            "axes.formatter.useoffset": False,
            "text.usetex": False,  # whatever the user's own settings say
        }
    ):
        figure = Figure(figsize=(4.2, 2.5), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        for index, series in enumerate(plot.series[:LARGEST_SERIES]):
            points = thinned(series.points)
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=_LINES[index % COLOURS],
                linestyle=_DASHES[index // COLOURS % len(_DASHES)],
                linewidth=1.3,
                marker="o" if len(points) < 25 else "",
                markersize=2.5,
                gid=f"series-{index}",
            )
        axes.set_xlabel(plot.x, color=_INK)
        axes.set_ylabel(plot.y, color=_INK)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=plot.x in ("step", "slot")))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.tick_params(colors=_INK, labelcolor=_INK)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.yaxis.offsetText.set_color(_INK)
        for side, spine in axes.spines.items():
            spine.set_color(_INK)
            spine.set_visible(side in ("left", "bottom"))
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(written.getvalue(), prefix)


def _for_page(text: str, prefix: str) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=<svg )(.*?)width="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(?<=<svg )(.*?) height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    for index, colour in enumerate(_LINES):
        text = text.replace(colour, f"var(--c{index})")
    return text
