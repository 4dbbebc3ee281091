"""Files of made-up runs for the report, and a browser that looks at the page."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[1] / "fixtures" / "facts.json"
CHROMIUM = shutil.which("chromium")
_LOOK = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement, found = [];
  if (root.scrollWidth > frame.clientWidth) found.push("the page is wider than the window: " + root.scrollWidth);
  const plots = [...page.querySelectorAll("figure")];
  for (const plot of plots) {
    const name = plot.querySelector("h3").textContent, svg = plot.querySelector("svg[id], svg");
    const edge = svg.getBoundingClientRect(), card = plot.getBoundingClientRect();
    const curves = [...svg.querySelectorAll('[id*="-series-"] path')];
    if (!curves.length) found.push(name + ": no curve");
    for (const curve of curves)
      if (!/[0-9]/.test(curve.getAttribute("d"))) found.push(name + ": a curve without points");
    const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    const boxes = [...plot.querySelectorAll(".legend span")].map(e => [e.textContent, e.getBoundingClientRect()]);
    const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    for (const [text, box] of texts)
      if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1
          || box.bottom > edge.bottom + 1)
        found.push(name + ": outside of its drawing: " + text);
    for (const [text, box] of boxes)
      if (box.left < card.left || box.right > card.right) found.push(name + ": outside of its card: " + text);
    for (const group of [texts, boxes, plots.map(e => [e.querySelector("h3").textContent, e.getBoundingClientRect()])])
      for (let i = 0; i < group.length; i++) for (let j = 0; j < i; j++)
        if (over(group[i][1], group[j][1])) found.push(name + ": overlap: " + group[i][0] + " / " + group[j][0]);
  }
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify({width: frame.clientWidth, plots: plots.length, found});
  document.body.append(answer);
};
"""


def files(rate: float = 6e-4, steps: int = 200, **config: Any) -> dict[str, str]:
    """What a run of `steps` steps writes."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "step",
            "step": step,
            "total_steps": steps,
            "time": 1e9 + step,
            "loss": 2 + 6 * math.exp(-step / 60) + 0.1 * math.sin(step),
            "accept_length": 1 + 2 * (1 - math.exp(-step / 90)),
            "lr": rate * min(1, step / 20),
            "tokens_per_second": 123456 + 900 * math.sin(step),
            "slot_accuracy": [0.9 ** (slot + 1) * (1 - math.exp(-step / 50)) for slot in range(15)],
            "workers": {
                "target 0": {"busy": 0.98},
                "drafter 0": {"busy": 0.4 + 0.02 * math.sin(step)},
                "balance": {"bottleneck": "targets"},
            },
        }
        for step in range(1, steps + 1)
    ]
    lines += [
        {"kind": "held_out", "step": step, "loss": 3.0, "accept_length": 2.2} for step in range(50, steps + 1, 50)
    ]
    spec = {
        "schema": 1, "run": "r", "job": "j", "container": "lab", "created": 1.0, "launched_by": "me@here",
        "release": "abc", "environment": "venv", "python": "/opt/venv/bin/python", "gpus": {},
        "config": {"optimizer": {"lr": rate}, **config},
    }  # fmt: skip
    compiled = [{"worker": "target 0", "device": "cuda:0", "mode": "graph", "kernels": 31, "seconds": 41.25}]
    sets = [{"name": "gsm8k", "answers": 20, "acceptance_length": 3.21, "speedup": 1.8, "identical": 20}]
    return {
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "spec.json": json.dumps(spec),
        "facts.json": FACTS.read_text(),
        "compile.json": json.dumps(compiled),
        "evaluation.json": json.dumps({"drafter": "d", "sets": sets}),
    }


def put(folder: Path, given: dict[str, str]) -> Path:
    """The files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in given.items():
        (folder / name).write_text(text)
    return folder


def browser(folder: Path, *words: str, width: int = 1400) -> subprocess.CompletedProcess[str]:
    """Headless Chromium, with a profile of its own and no way into a network."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", f"--window-size={width},2400"]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=120)


def look(folder: Path, page: str, width: int) -> dict[str, Any]:
    """What the browser finds wrong with the page in a window of that width."""
    wrapped = folder / f"look-{width}.html"
    wrapped.write_text(
        f'<meta charset="utf-8"><iframe style="border:0;width:{width}px;height:3000px" srcdoc="{escape(page)}">'
        "</iframe>"
        f"<script>{_LOOK}</script>"
    )
    done = browser(folder, "--virtual-time-budget=5000", "--dump-dom", wrapped.as_uri())
    answer = done.stdout.partition('<pre id="answer">')[2].partition("</pre>")[0]
    found: dict[str, Any] = json.loads(unescape(answer))
    found["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return found
