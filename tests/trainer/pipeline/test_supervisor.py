"""Whole runs in threads on a CPU: the same losses however the work is spread, stopped, resumed and slowed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.launching import ranks
from trainer.compilation.errors import CompilationError
from trainer.data.rows import Row, RowSource
from trainer.devices import DeviceError, find_device
from trainer.pipeline import supervisor
from trainer.pipeline.checkpoint_worker import CheckpointWorker
from trainer.pipeline.drafter_worker import DrafterWorker
from trainer.pipeline.row_worker import RowWorker
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.target_worker import TargetWorker
from trainer.pipeline.types import PipelineConfigError, PipelineError, StepReport, TrainState

from . import tiny

ROOT = Path(__file__).parents[3]


def test_a_run_reports_every_step_and_hands_over_a_checkpoint_at_its_end() -> None:
    recorder, outcome = tiny.train(tiny.run_config())
    assert [report.step for report in recorder.steps] == [1, 2, 3, 4, 5, 6]
    assert (outcome.step, outcome.total_steps, outcome.stopped) == (6, 6, False)
    assert [state.step for state in recorder.saved] == [6]
    assert recorder.statuses == ["loading the target", "preparing drafter 1/1"]
    assert [report["worker"] for report in recorder.compiled] == ["target 0", "drafter 0"]
    first = recorder.steps[0]
    assert 0 < first.tokens <= tiny.LENGTH
    assert first.anchors == tiny.ANCHORS
    assert first.grad_norm > 0
    assert first.lr == pytest.approx(1e-3)
    assert outcome.workers["drafter 0"]["rows"] == outcome.workers["target 0"]["rows"] == 6
    assert outcome.workers["balance"]["bottleneck"] in ("rows", "targets", "drafters")


def test_the_drafter_learns() -> None:
    recorder, _ = tiny.train(tiny.run_config(optimizer={"max_steps": 100, "lr": 5e-3}))
    assert sum(recorder.losses[-10:]) < 0.93 * sum(recorder.losses[:10])


def test_two_runs_and_any_number_of_targets_give_the_same_losses_to_the_last_bit() -> None:
    losses = [
        tiny.train(tiny.run_config(targets=targets, drafters=2, pipeline={"queue_depth": depth}))[0].losses
        for targets, depth in ((1, 2), (1, 2), (3, 1))
    ]
    assert losses[0] == losses[1] == losses[2]


def test_drafters_that_exchange_gradients_learn_what_one_learns_from_all_their_rows() -> None:
    several, _ = tiny.train(tiny.run_config(drafters=3))
    alone, _ = tiny.train(tiny.run_config(optimizer={"gradient_accumulation_steps": 3}))
    assert several.losses == pytest.approx(alone.losses, rel=1e-4)
    assert [report.tokens for report in several.steps] == [report.tokens for report in alone.steps]


@pytest.mark.parametrize("drafters", [(1, 1), (2, 1), (2, 2)])
def test_processes_give_the_losses_of_one_process_with_all_their_drafters(
    tmp_path: Path, drafters: tuple[int, int]
) -> None:
    program = "import sys, pathlib; from tests.trainer.pipeline import tiny; "
    program += "tiny.losses_of_this_process(int(sys.argv[2]), 6, pathlib.Path(sys.argv[1]))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / f"losses-{rank['RANK']}"), str(count)],
            cwd=ROOT,
            env=os.environ | rank | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        for rank, count in zip(ranks(), drafters, strict=True)
    ]
    try:
        assert [process.wait(40) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    expected = [loss.hex() for loss in tiny.train(tiny.run_config(drafters=sum(drafters)))[0].losses]
    for rank in range(2):
        assert (tmp_path / f"losses-{rank}").read_text().split() == expected


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_resumed_run_goes_on_bit_for_bit(optimizer: str, stop_at: int) -> None:
    config = tiny.run_config(targets=2, drafters=2, optimizer={"name": optimizer, "gradient_accumulation_steps": 2})
    whole, _ = tiny.train(config)
    first = tiny.Recorder()
    tiny.train(config, first, should_stop=lambda: len(first.steps) >= stop_at)
    state = first.saved[-1]
    assert stop_at <= state.step < 6
    second, outcome = tiny.train(config, start=state)
    assert first.losses + second.losses == whole.losses
    assert outcome.step == 6
    for name, tensor in whole.saved[-1].drafter.items():
        assert torch.equal(tensor, second.saved[-1].drafter[name])


def test_a_stop_finishes_the_step_in_every_drafter_and_saves_it() -> None:
    recorder = tiny.Recorder()
    config = tiny.run_config(drafters=2, optimizer={"max_steps": 10_000})
    _, outcome = tiny.train(config, recorder, should_stop=lambda: len(recorder.steps) >= 3)
    assert outcome.stopped
    assert 3 <= outcome.step < 10_000
    assert [state.step for state in recorder.saved] == [outcome.step] == [recorder.steps[-1].step]


def test_checkpoints_come_when_due_and_when_asked_for() -> None:
    recorder = tiny.Recorder()
    asked = iter([False, False, True])

    def should_checkpoint() -> bool:
        return len(recorder.steps) > 20 and next(asked, False)

    config = tiny.run_config(optimizer={"max_steps": 400}, checkpoint={"every": 150})
    tiny.train(config, recorder, should_checkpoint=should_checkpoint)
    steps = [state.step for state in recorder.saved]
    assert {150, 300, 400} <= set(steps)
    assert len(steps) == 4


def test_a_checkpoint_holds_its_own_tensors_while_training_goes_on() -> None:
    config = tiny.run_config(optimizer={"max_steps": 40}, checkpoint={"every": 10})
    recorder, _ = tiny.train(config)
    weights = [state.drafter["fc.weight"] for state in recorder.saved]
    assert len(weights) == 4
    assert all(not torch.equal(a, b) for a, b in pairwise(weights))
    replayed, _ = tiny.train(config, start=recorder.saved[1])
    assert torch.equal(replayed.saved[-1].drafter["fc.weight"], weights[-1])


@pytest.mark.parametrize("slow", [RowWorker, TargetWorker, DrafterWorker, CheckpointWorker])
def test_a_worker_that_is_slowed_a_hundred_times_delays_the_run_and_no_more(
    slow: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {RowWorker: "_read", TargetWorker: "_deliver", DrafterWorker: "_one_step", CheckpointWorker: "_write"}[
        slow
    ]
    original = getattr(slow, method)
    slowed: list[str] = []

    def slowly(self: Any, *arguments: Any) -> Any:
        slowed.append(self.name)
        if self.name == slowed[0]:  # one of them
            time.sleep(0.2)  # a step takes some 2 ms by itself
        return original(self, *arguments)

    monkeypatch.setattr(slow, method, slowly)
    config = tiny.run_config(targets=2, drafters=2, checkpoint={"every": 3})
    recorder, outcome = tiny.train(config)
    assert outcome.step == 6
    assert [state.step for state in recorder.saved] == [3, 6]
    assert slowed


def test_no_step_is_reported_while_a_worker_is_stuck_so_that_a_watchdog_starves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    original = TargetWorker._deliver
    delivered = 0

    def deliver(self: TargetWorker, *arguments: Any) -> Any:
        nonlocal delivered
        delivered += 1
        if delivered == 4:
            stuck.set()
            assert go_on.wait(60)
        return original(self, *arguments)

    monkeypatch.setattr(TargetWorker, "_deliver", deliver)
    recorder = tiny.Recorder()
    config = tiny.run_config()
    run = threading.Thread(target=lambda: tiny.train(config, recorder))
    run.start()
    assert stuck.wait(60)
    while len(recorder.steps) < 3:
        time.sleep(0.01)
    time.sleep(0.5)
    assert [report.step for report in recorder.steps] == [1, 2, 3]
    go_on.set()
    run.join(60)
    assert len(recorder.steps) == 6


def test_distillation_reaches_the_loss() -> None:
    plain, _ = tiny.train(tiny.run_config())
    distilled, _ = tiny.train(tiny.run_config(objective={"distillation": "forward_kl"}))
    assert plain.losses[0] != distilled.losses[0]


def test_the_window_of_a_report_names_every_worker_and_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.pipeline.statistics.WINDOW_SECONDS", 0.0)
    recorder, _ = tiny.train(tiny.run_config(targets=2, drafters=2))
    workers = recorder.steps[-1].workers
    assert set(workers) == {"rows", "target 0", "target 1", "drafter 0", "drafter 1", "balance", "queues"}
    assert set(workers["queues"]) == {"rows", "drafter 0", "drafter 1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipeline": {"targets": ["gpu0"]}}, "'gpu0' is no device: write cpu or cuda:0"),
        ({"pipeline": {"targets": ["cuda:5"]}}, "there is no cuda:5: this machine has"),
        ({"pipeline": {"targets": ["meta"]}}, "neither a CPU nor a CUDA GPU"),
        (
            {"data": {"epochs": 1}, "optimizer": {"gradient_accumulation_steps": 10_000}},
            "do not fill one optimizer step",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence_before_anything_starts(
    change: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises((PipelineConfigError, DeviceError), match=message):
        tiny.train(tiny.run_config(**change))


def test_a_checkpoint_past_the_last_step_is_refused() -> None:
    recorder, _ = tiny.train(tiny.run_config())
    with pytest.raises(PipelineConfigError, match="at step 6, past this run's last step 3"):
        tiny.train(tiny.run_config(optimizer={"max_steps": 3}), start=recorder.saved[-1])


def test_a_run_that_must_be_compiled_and_cannot_be_never_starts_slow() -> None:
    recorder = tiny.Recorder()
    config = tiny.run_config(pipeline={"mode": "graph", "require_compiled": True})
    with pytest.raises(PipelineError, match="there are no CUDA graphs on a CPU") as failure:
        tiny.train(config, recorder)
    assert isinstance(failure.value.__cause__, CompilationError)
    assert recorder.steps == []


def test_torch_s_global_generator_is_neither_used_nor_moved() -> None:
    state = torch.random.get_rng_state()
    pipeline = Pipeline(
        config := tiny.run_config(drafters=2),
        tiny.drafter_config(),
        tiny.row_source(config),
        (recorder := tiny.Recorder()).hooks(),
        load_target=tiny.load_target,
    )
    pipeline.run()
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    again, _ = tiny.train(tiny.run_config(drafters=2))
    assert again.losses == recorder.losses


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_a_compiled_run_equals_an_eager_one_and_starts_from_a_warmed_cache(tmp_path: Path) -> None:
    from trainer.commands.warmup import warm_up

    section = {"mode": "compiled", "require_compiled": True, "compile_cache": tmp_path}
    config = tiny.run_config(drafters=2, pipeline=section)
    warmed = warm_up(config, tiny.drafter_config(), tiny.row_source(config).shape, ["cpu"])
    assert warmed[0].cache_misses > 0
    torch._dynamo.reset()
    compiled, _ = tiny.train(config)
    eager, _ = tiny.train(tiny.run_config(drafters=2))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    assert len(list(tmp_path.iterdir())) == 1, "the trainer's sources changed while the test ran"
    drafters = [report for report in compiled.compiled if report["worker"].startswith("drafter")]
    assert len(drafters) == 2
    for report in drafters:
        assert (report["mode"], report["graphs"], report["graph_breaks"], report["recompiles"]) == ("compiled", 5, 0, 0)
        assert report["kernels"] > 0
        assert report["cache_misses"] == 0
        assert report["cache_hits"] == 5
        assert report["cache_bytes"] > 0


def test_a_step_whose_rows_supervise_nothing_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowSource.row

    def row(self: RowSource, number: int) -> Row:
        made = original(self, number)
        return replace(made, loss_mask=torch.zeros_like(made.loss_mask)) if number == 2 else made

    monkeypatch.setattr(RowSource, "row", row)
    recorder, outcome = tiny.train(tiny.run_config())
    assert outcome.step == 6
    assert [math.isnan(report.loss) for report in recorder.steps] == [False, False, True, False, False, False]


def test_a_checkpoint_comes_with_the_sums_of_all_steps_since_the_one_before_however_slow_the_listener() -> None:
    recorder = tiny.Recorder()

    def on_step(report: StepReport) -> None:
        time.sleep(0.05)
        recorder.steps.append(report)

    tiny.train(tiny.run_config(checkpoint={"every": 2}), recorder, on_step=on_step)
    assert [state.step for state in recorder.saved] == [2, 4, 6]
    for number, sums in enumerate(recorder.saved_sums):
        first, second = recorder.steps[2 * number : 2 * number + 2]
        assert sums is not None
        assert torch.equal(sums, first.sums + second.sums)


@pytest.mark.parametrize("ends", [True, False])
def test_a_stop_while_a_worker_compiles_does_not_wait_for_it(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 5.0 if ends else 0.2)
    compiling, let_go = threading.Event(), threading.Event()

    def prepare(self: DrafterWorker) -> None:
        compiling.set()
        assert let_go.wait(30)

    def should_stop() -> bool:
        if ends and compiling.is_set():
            let_go.set()
        return compiling.is_set()

    monkeypatch.setattr(DrafterWorker, "prepare", prepare)
    recorder, outcome = tiny.train(tiny.run_config(), should_stop=should_stop)
    let_go.set()
    assert (outcome.step, outcome.stopped) == (0, True)
    assert outcome.stuck == ([] if ends else ["drafter 0"])
    assert (recorder.steps, recorder.saved) == ([], [])


def test_a_gpu_without_a_number_is_the_one_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [str(find_device(name)) for name in ("cuda", "cuda:2")] == ["cuda:0", "cuda:2"]
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [str(find_device(name)) for name in ("cuda", "cuda:2")] == ["cuda:3", "cuda:2"]


def test_cpus_and_gpus_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(PipelineConfigError, match="use one kind"):
        tiny.train(tiny.run_config(pipeline={"drafters": ["cuda:0"]}))


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_two_thousand_steps_grow_neither_memory_nor_threads_nor_files() -> None:
    import psutil

    process = psutil.Process()
    sizes: list[tuple[int, int, int]] = []

    def on_step(report: StepReport) -> None:
        if report.step in (400, 2000):
            sizes.append((process.memory_info().rss, process.num_threads(), process.num_fds()))

    config = tiny.run_config(
        targets=2, drafters=3, small=True, optimizer={"max_steps": 2000}, checkpoint={"every": 100}
    )
    saved: list[int] = []

    def save(state: TrainState, sums: torch.Tensor | None) -> None:
        saved.append(state.step)

    threads_before = threading.active_count()
    _, outcome = tiny.train(config, on_step=on_step, save=save)
    assert outcome.step == 2000
    assert saved == list(range(100, 2001, 100))
    (rss, threads, files), (later_rss, later_threads, later_files) = sizes
    assert later_rss - rss < 16 * 2**20
    assert later_threads <= threads
    assert later_files <= files
    assert threading.active_count() == threads_before
