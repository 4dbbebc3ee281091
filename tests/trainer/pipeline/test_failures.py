"""Every failure ends the run with its first cause, its worker's name, and a checkpoint where one is safe.

The time limit of each test is the promise that a run ends within seconds; a hang is a failure with all stacks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainer.checkpoint import CheckpointError
from trainer.data.rows import Row, RowSource
from trainer.pipeline import supervisor
from trainer.pipeline.exchange import Alone, Collective, Group
from trainer.pipeline.queues import Ring
from trainer.pipeline.types import PipelineError, StepReport, TrainState
from trainer.pipeline.workers import CheckpointWorker, NonFiniteError, TargetWorker
from trainer.step import DrafterStep

from . import tiny

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[3]


class Boom(Exception):
    pass


def on_call(number: int, error: BaseException, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, but its call with this number (over all objects and threads) raises."""
    lock, calls = threading.Lock(), 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            mine = calls
        if mine == number:
            raise error
        return original(*arguments, **keywords)

    return call


def fails(recorder: tiny.Recorder | None = None, **hooks: Any) -> tuple[PipelineError, tiny.Recorder]:
    recorder = recorder or tiny.Recorder()
    threads = threading.active_count()
    with pytest.raises(PipelineError) as failure:
        tiny.train(tiny.run_config(targets=2, drafters=2, optimizer={"max_steps": 1000}), recorder, **hooks)
    assert failure.value.stuck == []
    assert threading.active_count() == threads, "a thread outlived the run"
    return failure.value, recorder


def assert_emergency_checkpoint(recorder: tiny.Recorder, at_least: int) -> None:
    """The saved state is one that an undisturbed run passes through."""
    (state,) = recorder.saved
    assert state.step >= at_least
    undisturbed = tiny.Recorder()
    config = tiny.run_config(drafters=2, optimizer={"max_steps": 1000}, checkpoint={"every": 1})
    tiny.train(config, undisturbed, should_stop=lambda: len(undisturbed.saved) > state.step)
    same = undisturbed.saved[state.step - 1]
    assert same.step == state.step
    for name, tensor in same.drafter.items():
        assert torch.equal(tensor, state.drafter[name])
    for name, tensor in same.optimizer.items():
        assert torch.equal(tensor, state.optimizer[name])


def test_an_exception_in_a_target_ends_the_run_and_keeps_the_finished_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetWorker, "_deliver", on_call(21, Boom("target broke"), TargetWorker._deliver))
    failure, recorder = fails()
    assert failure.worker in ("target 0", "target 1")
    assert isinstance(failure.__cause__, Boom)
    assert str(failure) == f"{failure.worker} failed: Boom: target broke"
    monkeypatch.undo()
    assert_emergency_checkpoint(recorder, at_least=1)


def test_a_row_that_cannot_be_read_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowSource.row

    def row(self: RowSource, number: int) -> Row:
        if number == 20:
            raise OSError("Input/output error: tokens.i32")
        return original(self, number)

    monkeypatch.setattr(RowSource, "row", row)
    failure, recorder = fails()
    assert failure.worker == "rows"
    assert isinstance(failure.__cause__, OSError)
    monkeypatch.undo()
    assert_emergency_checkpoint(recorder, at_least=1)


def test_an_exception_in_a_drafter_ends_the_run_before_its_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterStep, "accumulate", on_call(9, Boom("bad row"), DrafterStep.accumulate))
    failure, recorder = fails()
    assert failure.worker in ("drafter 0", "drafter 1")
    monkeypatch.undo()
    assert_emergency_checkpoint(recorder, at_least=4)
    assert recorder.saved[0].step == 4


def test_a_gpu_out_of_memory_is_told_as_such_and_keeps_the_finished_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(DrafterStep, "accumulate", on_call(9, error, DrafterStep.accumulate))
    failure, recorder = fails()
    assert "OutOfMemoryError: CUDA out of memory" in str(failure)
    assert [state.step for state in recorder.saved] == [4]


def test_a_device_that_is_lost_ends_the_run_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterStep, "accumulate", on_call(9, Boom("CUDA error: device lost"), DrafterStep.accumulate))

    def lost(step: DrafterStep) -> Any:
        raise RuntimeError("CUDA error: device lost")

    original = DrafterStep.prepare

    def prepare(step: DrafterStep, turn: Any) -> None:
        original(step, turn)
        step.copy_state = lost.__get__(step)  # type: ignore[method-assign]

    monkeypatch.setattr(DrafterStep, "prepare", prepare)
    failure, recorder = fails()
    assert "device lost" in str(failure)
    assert recorder.saved == []


def test_an_interrupted_optimizer_update_is_never_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterStep, "update", on_call(9, Boom("half written"), DrafterStep.update))
    failure, recorder = fails()
    if failure.worker == "drafter 0":
        assert recorder.saved == []
    else:
        assert [state.step for state in recorder.saved] in ([4], [5])


def test_a_loss_that_is_not_a_number_ends_the_run_with_the_step_and_finite_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = DrafterStep.load
    rows = 0

    def load(self: DrafterStep, row: Row, features: torch.Tensor, last_hidden: torch.Tensor | None) -> None:
        nonlocal rows
        rows += row.number == 10
        original(self, row, features * float("nan") if row.number == 10 else features, last_hidden)

    monkeypatch.setattr(DrafterStep, "load", load)
    failure, recorder = fails()
    assert rows == 1
    assert isinstance(failure.__cause__, NonFiniteError)
    assert "step 6: loss nan" in str(failure)
    assert [report.step for report in recorder.steps] == [1, 2, 3, 4, 5]
    (state,) = recorder.saved
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.drafter.values())


def test_a_full_disk_at_a_checkpoint_ends_the_run_and_is_not_tried_again() -> None:
    calls: list[int] = []

    def save(state: TrainState, sums: torch.Tensor | None) -> None:
        calls.append(state.step)
        raise CheckpointError("checkpoint of step 5 not written: the disk is full")

    with pytest.raises(PipelineError) as failure:
        tiny.train(tiny.run_config(optimizer={"max_steps": 1000}, checkpoint={"every": 5}), save=save)
    assert failure.value.worker == "checkpoint"
    assert "the disk is full" in str(failure.value)
    assert calls == [5]


def test_a_failed_run_leaves_the_folder_to_a_writer_that_is_still_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SAVE_SECONDS", 0.2)
    writing, let_go = threading.Event(), threading.Event()
    writers = 0

    def save(state: TrainState, sums: torch.Tensor | None) -> None:
        nonlocal writers
        writers += 1
        writing.set()
        let_go.wait(30)

    def on_step(report: StepReport) -> None:
        if report.step == 8:
            assert writing.wait(30)
            raise Boom("listener broke")

    config = tiny.run_config(optimizer={"max_steps": 1000}, checkpoint={"every": 5})
    with pytest.raises(PipelineError) as failure:
        tiny.train(config, save=save, on_step=on_step)
    assert failure.value.stuck == ["checkpoint"]
    assert writers == 1
    let_go.set()


def test_a_checkpoint_that_was_handed_over_but_not_begun_is_written_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over = threading.Event()
    original = CheckpointWorker.work

    def put(self: Ring[Any], k: int, item: Any, original: Any = Ring.put) -> None:
        original(self, k, item)
        if isinstance(item, tuple):  # only checkpoints are
            handed_over.set()

    def work(self: CheckpointWorker) -> None:
        assert handed_over.wait(30)
        self.shared.fail("target 0", Boom("just then"))
        original(self)

    monkeypatch.setattr(Ring, "put", put)
    monkeypatch.setattr(CheckpointWorker, "work", work)
    recorder = tiny.Recorder()
    with pytest.raises(PipelineError, match="just then"):
        tiny.train(tiny.run_config(checkpoint={"every": 6}), recorder)
    assert [state.step for state in recorder.saved] == [6]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_while_a_group_is_left_hides_neither_success_nor_the_first_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def close(self: Collective) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Collective, "close", close)
    _, outcome = tiny.train(tiny.run_config(drafters=2))
    assert outcome.step == 6
    assert "drafter 1 did not end cleanly: connection closed by peer" in caplog.text
    monkeypatch.setattr(DrafterStep, "accumulate", on_call(9, Boom("bad row"), DrafterStep.accumulate))
    failure, _ = fails()
    assert isinstance(failure.__cause__, Boom)
    assert all(isinstance(error, Boom) for _, error in failure.later)


def test_a_collective_that_waits_for_a_lost_process_0_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.2)
    never = threading.Event()

    def gone(self: Group) -> str | None:
        raise RuntimeError("connection reset by peer")

    def hang(self: Alone, buffer: torch.Tensor) -> None:
        never.wait(60)

    monkeypatch.setattr(Group, "join", lambda *_: Group(HashStore(), 1, 2, 0, 1, 0, 1))
    monkeypatch.setattr(Group, "reported_failure", gone)
    monkeypatch.setattr(Alone, "add_up", hang)
    with pytest.raises(PipelineError, match="meeting point is gone") as failure:
        tiny.train(tiny.run_config())
    assert failure.value.worker == "another process"
    assert failure.value.stuck == ["drafter 0"]
    never.set()


def test_a_failing_hook_ends_the_run_in_its_own_name() -> None:
    def on_step(report: StepReport) -> None:
        if report.step == 3:
            raise OSError("metrics.jsonl: No space left on device")

    failure, _ = fails(on_step=on_step)
    assert failure.worker == "main"
    assert "No space left" in str(failure)


@pytest.mark.parametrize(("owner", "name"), [(DrafterStep, "prepare"), (TargetWorker, "prepare")])
def test_a_failure_while_compiling_ends_the_run_before_the_first_step(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, on_call(2, Boom("does not compile"), getattr(owner, name)))
    failure, recorder = fails()
    assert failure.worker in ("drafter 1", "target 1")
    assert recorder.steps == []
    assert recorder.saved == []


def test_the_first_cause_comes_first_and_what_it_brought_down_is_listed_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both_work, first_done = threading.Barrier(2), threading.Event()

    def deliver(self: TargetWorker, *arguments: Any) -> Any:
        both_work.wait(30)
        if self.name == "target 1":
            raise Boom("the cause")
        assert first_done.wait(30)
        raise Boom("a consequence")

    original = supervisor.Shared.fail

    def fail(self: supervisor.Shared, worker: str, error: BaseException) -> None:
        original(self, worker, error)
        first_done.set()

    monkeypatch.setattr(TargetWorker, "_deliver", deliver)
    monkeypatch.setattr(supervisor.Shared, "fail", fail)
    failure, _ = fails()
    assert failure.worker == "target 1"
    assert str(failure.__cause__) == "the cause"
    assert [(worker, str(error)) for worker, error in failure.later] == [("target 0", "a consequence")]


def test_a_thread_that_hangs_in_a_driver_is_named_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.5)
    never = threading.Event()
    hangs = threading.Event()
    original = TargetWorker._deliver

    def deliver(self: TargetWorker, *arguments: Any) -> Any:
        if self.name == "target 0":
            hangs.set()
            never.wait(40)
        elif hangs.wait(30):
            raise Boom("the other one")
        return original(self, *arguments)

    monkeypatch.setattr(TargetWorker, "_deliver", deliver)
    with pytest.raises(PipelineError) as failure:
        tiny.train(tiny.run_config(targets=2, optimizer={"max_steps": 50}))
    assert failure.value.stuck == ["target 0"]
    assert failure.value.worker == "target 1"
    never.set()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["exception", "kill"])
def test_when_one_process_goes_down_the_others_follow_and_say_why(how: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "from tests.trainer.pipeline.test_failures import peer; peer()", how],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert processes[0].returncode == 1
    if how == "exception":
        assert "target 0 failed: Boom: one process breaks" in outputs[1]
        # It learns it from the other process's word or from the broken connection, whichever comes first.
        assert (
            "another process failed: PeerError: process 1: target 0 failed" in outputs[0]
            or "drafter 0 failed" in (outputs[0])
        )
    else:
        assert processes[1].returncode == -signal.SIGKILL
        assert "drafter 0 failed" in outputs[0]


def peer() -> None:
    """One of two processes; process 1 breaks after some rows."""
    how = sys.argv[1]
    recorder = tiny.Recorder()
    if os.environ["RANK"] == "1":
        original = TargetWorker._deliver
        if how == "exception":
            TargetWorker._deliver = on_call(9, Boom("one process breaks"), original)  # type: ignore[method-assign]

    def on_step(report: StepReport) -> None:
        if how == "kill" and os.environ["RANK"] == "1" and report.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        tiny.train(tiny.run_config(optimizer={"max_steps": 100_000}), recorder, on_step=on_step)
    except PipelineError as error:
        print(error, flush=True)
        os._exit(1)
