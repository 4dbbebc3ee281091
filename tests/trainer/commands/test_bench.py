"""The benchmarks run anywhere and say what they promise; how fast is for their readers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from trainer.arguments import PRESETS, read
from trainer.bench import pipeline, shapes
from trainer.bench.gil import in_microseconds
from trainer.bench.show import ran_as
from trainer.bench.threads import differing
from trainer.commands import bench
from trainer.compilation.errors import CompilationError
from trainer.compilation.report import CompileReport


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert bench.main(read(["bench", *arguments, "--preset", "tiny", "--device", "cpu", "--mode", "eager"])) == 0
    said = capsys.readouterr()
    assert "{'" not in said.err  # sentences and tables
    assert "[(" not in said.err
    found: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    return found


@pytest.mark.parametrize(("target", "drafter", "slower"), [(2.0, 8.0, 4.0), (8.0, 2.0, 2.0)])
def test_the_pipeline_is_compared_with_the_slower_of_its_sides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: float, drafter: float, slower: float
) -> None:
    monkeypatch.setattr(pipeline, "target_alone", lambda *_: (target, None))
    monkeypatch.setattr(pipeline, "drafter_alone", lambda *_: drafter)
    found = run(capsys, "pipeline", "--steps", "3", "--targets", "cpu", "cpu")
    assert found["pipeline_rows_per_second"] > 0
    assert found["ratio"] * slower == pytest.approx(found["pipeline_rows_per_second"])


def test_the_pipeline_is_measured_beside_each_of_its_sides(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "pipeline", "--steps", "3", "--targets", "cpu", "cpu")
    assert found["target_alone_rows_per_second"] > 0
    assert found["drafter_alone_rows_per_second"] > 0
    assert found["recompiles_after_start"] == 0
    assert {"target 0", "target 1", "drafter 0", "balance"} <= set(found["workers"])
    assert {name: set(wait) for name, wait in found["gil_wait_us"].items()} == {
        "idle process": {"mean", "p99"},
        "pipeline": {"mean", "p99"},
    }


def test_the_wait_for_the_gil_is_told_by_mean_and_99th_percentile_in_microseconds() -> None:
    assert in_microseconds([number / 1e6 for number in range(101)]) == {"mean": 50.0, "p99": 99.0}


def test_a_target_s_pass_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "target", "--steps", "2")["rows_per_second"]["launched"] > 0


def test_threads_on_one_device_are_measured_against_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "threads", "--steps", "2", "--threads", "2")
    assert found["eager_1_rows_per_second"] > 0
    assert found["eager_2_rows_per_second"] > 0


def test_a_step_is_the_sum_of_its_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "step", "--steps", "1", "--anchors", "16")
    assert set(found["milliseconds"]) == {"load", "forward", "chunks", "backward", "update"}
    assert found["step_milliseconds"] == pytest.approx(sum(found["milliseconds"].values()))
    assert found["chunks"] == -(-found["valid_slots"] // 112)


def test_the_first_step_is_timed_from_the_start_of_a_process_with_an_empty_and_a_full_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run(capsys, "first-step")
    for state in ("cold", "warm"):
        assert found[state]["seconds"] > found[state]["target_loaded"] > 0


def test_the_command_line_and_the_benchmarks_name_the_same_presets() -> None:
    assert set(PRESETS) == set(shapes.PRESETS)


def test_a_table_says_at_its_head_what_each_worker_ran_as_and_went_without() -> None:
    report = CompileReport(
        "target 0", "cuda:0", "graph", False, 0, 0, 0, 0, ["forward"], 0, 0, 1.0, "its layers are not compiled",
        "target.compile: false",
    )  # fmt: skip
    assert (
        ran_as([report, asdict(report)])
        == ["ran as: target 0 graph, not compiled (its layers are not compiled; allowed by target.compile: false)"] * 2
    )


def test_a_target_that_misses_what_is_measured_is_shown_as_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CompilationError("target 0: its layers run uncompiled")

    monkeypatch.setattr("trainer.bench.target.target_alone", refuse)
    assert bench.main(read(["bench", "target", "--preset", "tiny", "--device", "cpu", "--mode", "eager"])) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert found["rows_per_second"] == {"launched": None}
    assert found["not_run"] == {"launched": "target 0: its layers run uncompiled"}
    assert "not run" in said.err


def test_losses_are_compared_bit_by_bit() -> None:
    assert differing([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (0, 0.0)
    assert differing([1.0, 2.5, 3.0], [1.0, 2.0, 4.0]) == (2, 0.25)


@pytest.mark.parametrize(
    ("targets", "drafters", "right"),
    [
        (["cuda:0"], ["cuda:1"], 2.0),
        (["cuda:0"], ["cuda:0"], 1 / (1 / 2 + 1 / 4)),
        # Three drafters on the target's device share it: they do not make it three devices.
        (["cuda:0"], ["cuda:0"] * 3, 1 / (1 / 2 + 1 / 4)),
        (["cuda:0"], ["cuda:0", "cuda:1"], 1 / (1 / 2 + 1 / 8)),
        (["cuda:0", "cuda:1", "cuda:2"], ["cuda:3"], 4.0),
    ],
)
def test_devices_that_workers_share_bound_the_pipeline(targets: list[str], drafters: list[str], right: float) -> None:
    assert pipeline.possible_rate(targets, drafters, 2.0, 4.0, shared=True) == pytest.approx(right)
