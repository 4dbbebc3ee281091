"""A status is drawn: series, counts, workers, the live view."""

from __future__ import annotations

import io
import json
import os
import time
from typing import Any

import pytest
from rich.console import Console

from dflash_ops.errors import Exit
from dflash_ops.run.probes.gpu import Device, GpuDevices
from dflash_ops.run.record import GpuRoles
from dflash_ops.run.status import Status
from dflash_ops.show import status as render
from dflash_ops.verbs.status import status
from tests.ops.container import ABSENT, WELL, Container, alive, ended, shown


def test_status_shows_probes_progress_and_job(container: Container) -> None:
    container.run("r1", alive())
    text = shown(render.status_view(status(container.session(), "r1")))
    for part in ("r1  running", "unit  ✓", "log   ✓", "gpu   –", "3/20", "loss 3.800", "smoke on lab", "ann@laptop"):
        assert part in text


def test_status_of_a_failed_run_shows_the_end_of_its_log(container: Container) -> None:
    folder = container.run("r1", ABSENT, exit=ended("exit-code", "exited", "1"))
    (folder / "log").write_text("Traceback (most recent call last):\nValueError: \x1b[2J17 rows, 16 wanted\n")
    answer = status(container.session(), "r1")
    text = shown(render.status_view(answer))
    assert answer.exit_code == Exit.RUN_FAILED
    assert "│ ValueError: \\x1b[2J17 rows, 16 wanted" in text


def test_a_progress_bar_does_not_hide_why_a_run_failed(container: Container) -> None:
    folder = container.run("r1", ABSENT, exit=ended("exit-code", "exited", "1"))
    bar = "".join(f"\rsaving {i}/251" for i in range(251))
    (folder / "log").write_text(f"torch.OutOfMemoryError: CUDA out of memory\n{bar}\n")
    answer = status(container.session(), "r1")
    assert "CUDA out of memory" in answer.reason
    text = shown(render.status_view(answer))
    assert "│ torch.OutOfMemoryError: CUDA out of memory" in text
    assert "│ saving 250/251" in text
    assert "249/251" not in text


def test_a_fifo_in_place_of_the_log_is_said_and_not_waited_for(container: Container) -> None:
    folder = container.run("r1", alive())
    (folder / "log").unlink()
    os.mkfifo(folder / "log")
    answer = status(container.session(), "r1")
    assert answer.log.kind == "unknown"
    assert "is no ordinary file" in shown(render.status_view(answer))


def test_a_run_that_ended_has_no_time_left(container: Container) -> None:
    folder = container.run("r1", alive(), steps=3)
    steps = [{"kind": "step", "step": i, "total_steps": 20, "time": 1000.0 + 60 * i} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert " left" in shown(render.status_view(status(container.session(), "r1")))
    (folder / "exit.json").write_text(json.dumps({**WELL, "result": "signal", "exit_code": "killed"}))
    container.units["dflash-r1.service"] = ABSENT
    assert " left" not in shown(render.status_view(status(container.session(), "r1")))


def test_the_last_measurement_on_held_out_rows_stands_beside_the_progress(container: Container) -> None:
    folder = container.run("r1", alive(), steps=3)
    with (folder / "metrics.jsonl").open("a") as stream:
        for step, loss in ((1, 4.0), (2, 2.31)):
            stream.write(json.dumps({"kind": "held_out", "step": step, "loss": loss, "accept_length": 2.4}) + "\n")
        stream.write(json.dumps({"kind": "step", "step": 4, "total_steps": 20, "loss": 3.0}) + "\n")
    answer = status(container.session(), "r1")
    text = " ".join(shown(render.status_view(answer)).split())
    assert "held out loss 2.310 accepts 2.40 at step 2" in text
    assert answer.progress is not None
    assert answer.progress.last.step == 4
    assert answer.model_dump(mode="json")["progress"]["held_out"]["accept_length"] == 2.4


@pytest.mark.parametrize("line", [{"kind": "held_out"}, {"kind": "held_out", "step": -1}, None])
def test_status_shows_no_measurement_where_there_is_none(container: Container, line: dict[str, Any] | None) -> None:
    folder = container.run("r1", alive(), steps=3)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    text = shown(render.status_view(status(container.session(), "r1")))
    assert "3/20" in text
    assert "held out" not in text


def test_status_says_what_a_worker_runs_without_and_which_field_allows_it(container: Container) -> None:
    folder = container.run("r1", alive())
    whole = {"worker": "drafter 0", "device": "cuda:1", "mode": "graph", "note": "", "allowed_by": "", "kernels": 112}
    slower = {"worker": "target 0", "device": "cuda:0", "mode": "graph", "note": "its layers are \x1b[2J not compiled"}
    (folder / "compile.json").write_text(json.dumps([{**slower, "allowed_by": "target.compile: false"}, whole]))
    answer = status(container.session(), "r1")
    text = " ".join(shown(render.status_view(answer)).split())
    assert "slower" in text
    assert "target 0: its layers are \\x1b[2J not compiled; allowed by target.compile: false" in text
    assert "drafter 0" not in text
    assert [worker.model_dump() for worker in answer.compiled][1] == {
        "worker": "drafter 0", "mode": "graph", "note": "", "allowed_by": "",
    }  # fmt: skip


@pytest.mark.parametrize("damaged", ["", "{", "[1, null]", '{"worker": "x"}'])
def test_a_damaged_compile_report_does_not_keep_status_from_answering(container: Container, damaged: str) -> None:
    folder = container.run("r1", alive())
    (folder / "compile.json").write_text(damaged)
    assert status(container.session(), "r1").compiled == ()


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([None, float("nan")], ""),
        ([1.0], "▄"),
        ([2.0, 2.0, 2.0], "▄▄▄"),
        ([0.0, 1.0], "▁█"),
        ([0.0, None, 7.0], "▁█"),
        ([float(i) for i in range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_sparkline_spans_from_the_smallest_to_the_largest(values: list[float | None], bars: str) -> None:
    assert render.sparkline(values) == bars


def test_a_long_series_is_drawn_in_the_width_that_there_is() -> None:
    assert len(render.sparkline([float(i) for i in range(1000)], 24)) == 24


@pytest.mark.parametrize(("value", "text"), [(940, "940"), (4321, "4.3k"), (123_456, "123k"), (1.2e6, "1.2M")])
def test_counts_are_short(value: float, text: str) -> None:
    assert render.count(value) == text


def test_the_watch_view_ends_with_the_last_status(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", alive())
    answer: Status = status(container.session(), "r1")
    assert render.show_watch(iter([answer])) is answer
    assert "r1  running" in capsys.readouterr().out


def test_the_workers_and_the_bottleneck_are_shown_as_the_trainer_reports_them(container: Container) -> None:
    folder = container.run("r1", alive())
    workers = {
        "target 0": {"busy": 0.98, "rows": 3},
        "drafter 0": {"busy": 0.44},
        "balance": {"bottleneck": "targets"},
        "queues": {"rows": 0.2},
    }
    record = {"kind": "step", "step": 4, "total_steps": 20, "time": time.time(), "loss": 3.0, "workers": workers}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    text = shown(render.status_view(status(container.session(), "r1")))
    assert "target 0 98%, drafter 0 44%; bottleneck: targets" in text


@pytest.mark.parametrize("width", range(38, 100, 3))
def test_no_figure_of_a_gpu_is_cut_at_any_width(width: int) -> None:
    words = {"utilization": 87, "memory_used": 123456, "memory_total": 143771, "power": 688, "power_limit": 700}
    devices = [
        Device.model_validate({"index": i, "name": "NVIDIA H200", "temperature": 71, "fault": fault, **words})
        for i, fault in enumerate([None, "uncorrectable ECC errors"])
    ]
    stream = io.StringIO()
    table = render.GpuTable(GpuDevices(devices=tuple(devices)), GpuRoles(target=(0,), drafters=(1,)))
    Console(file=stream, width=width).print(table)
    header, *rows = stream.getvalue().splitlines()
    shown = " ".join(rows)
    for column, figure in {
        "MEMORY": "120.6/140 GiB",
        "POWER": "688/700 W",
        "TEMP": "71 °C",
        "UTIL": "87 % ████",
    }.items():
        assert (shown.count(figure) == 2) == (column in header)
    assert ("TEMP" in header) != ("…" in header)
    assert all(word in shown for word in ("uncorrectable", "ECC", "errors"))
