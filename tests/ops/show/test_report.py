"""The report's page is whole in itself, says what it lacks, and looks right in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_ops.show.report.data import GpuSample, RunData, plots, read_run
from dflash_ops.show.report.page import page
from dflash_ops.show.report.svg import thinned
from tests.ops.show.report_runs import CHROMIUM, browser, files, look

pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
GPU = [GpuSample(1e9 + 60 * n, index, 90.0 - index, 600.0 + n) for n in range(20) for index in range(2)]


def both() -> list[RunData]:
    return [read_run("first", files(), GPU), read_run("second-with-a-rather-long-name-of-sixty", files(3e-4))]


def test_every_curve_is_drawn_once_its_numbers_are_there() -> None:
    drawn, missing = plots(both())
    assert [plot.title for plot in drawn] == [
        "Loss", "Expected accepted length", "Learning rate", "Speed", "Accuracy of each slot", "Slots at the last step",
        "Busy workers", "Held-out loss", "Held-out accepted length", "GPU use", "GPU power",
    ]  # fmt: skip
    assert missing == []


def test_what_a_run_does_not_measure_is_said_not_drawn() -> None:
    given = files()
    given["metrics.jsonl"] = "\n".join(line for line in given["metrics.jsonl"].split("\n") if "held_out" not in line)
    text = page([read_run("r", given)], [], "now")
    assert "GPU power: a run keeps no samples of its GPUs" in text
    assert "Held-out loss: the run measures no held-out rows" in text


def test_steps_that_a_resumed_run_wrote_again_are_drawn_once_and_damage_is_noted() -> None:
    lines = ['{"kind": "step", "step": 1, "loss": 9}', '{"kind": "step", "step": 2, "loss": 8}', '{"kind": "resume"}']
    lines += ['{"kind": "step", "step": 2, "loss": 7}', '{"kind": "step", "step": 3, "loss": NaN}', '{"kind": "st', "7"]
    run = read_run("r", {"metrics.jsonl": "\n".join(lines)})
    loss = plots([run])[0][0]
    assert loss.series[0].points == [(1.0, 9.0), (2.0, 7.0)]
    assert run.notes == ["2 lines of metrics.jsonl could not be read"]


def test_a_run_without_any_file_still_makes_a_page() -> None:
    text = page([read_run("r", {"spec.json": "{"})], [], "now")
    assert "no step was written yet" in text
    assert "spec.json is damaged" in text


def test_the_page_asks_no_network_for_anything_and_runs_no_script() -> None:
    text = page(both(), [], "now")
    assert "<script" not in text
    assert set(re.findall(r'(?:href|src)="([^"#]*)', text)) <= {"data:,", ""}
    assert not re.findall(r"url\((?!#)|@import", text)
    assert len(text) < 600_000


def test_what_a_run_wrote_is_text_and_never_markup() -> None:
    given = files(evil="<script>alert(1)</script>")
    given["metrics.jsonl"] = given["metrics.jsonl"].replace("target 0", "<img src=x onerror=alert(1)>")
    text = page([read_run("<b>", given)], [("<i>", "config", "<u>", "<s>", None)], "now")
    assert not re.search(r"<(script|img|b|i|u|s)>|<img", text)


def test_ids_of_the_drawings_are_unique() -> None:
    ids = re.findall(r'\bid="([^"]*)"', page(both(), [], "now"))
    assert len(ids) == len(set(ids))


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    points = [(float(n), 0.0) for n in range(100_001)]
    kept = thinned(points)
    assert len(kept) <= 601
    assert (kept[0], kept[-1]) == (points[0], points[-1])


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("several", [False, True])
def test_nothing_overlaps_or_overflows_in_a_browser(tmp_path: Path, width: int, several: bool) -> None:
    runs = both() if several else both()[:1]
    other = [(runs[-1].name, "config", "optimizer.lr", "0.0006", "0.0003")] if several else []
    found = look(tmp_path, page(runs, other, "now"), width)
    assert found == {"width": width, "plots": 11, "found": [], "console": []}


@needs_browser
def test_the_look_finds_what_is_wrong(tmp_path: Path) -> None:
    text = page(both()[:1], [], "now")
    broken = re.sub(r'(-series-0">\s*<path d=")[^"]*', r"\1", text, count=1)
    broken = broken.replace("</h1>", '</h1><div style="width:900px">wide</div><script>console.error(1)</script>')
    broken = broken.replace("</style></head>", "svg text{font-size:40px!important}</style></head>")
    found = look(tmp_path, broken, 390)
    assert "Loss: a curve without points" in found["found"]
    assert any("overlap" in fault for fault in found["found"])
    assert any("outside of its drawing" in fault for fault in found["found"])
    assert any("wider than the window" in fault for fault in found["found"])
    assert found["console"]  # the page's own policy refuses the script


@needs_browser
def test_it_prints(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(both(), [], "now"))
    browser(tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", (tmp_path / "page.html").as_uri())
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
