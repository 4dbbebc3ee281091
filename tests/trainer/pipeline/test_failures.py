"""Every failure ends the run with its first cause, its worker's name, and a checkpoint where one is safe.

The time limit of each test is the promise that a run ends within seconds; a hang is a failure with all stacks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.launching import CONTEXT
from trainer.data.rows import Row, RowSource
from trainer.exchange.peers import SetupError
from trainer.exchange.reduce import Collective
from trainer.pipeline import supervisor
from trainer.pipeline.checkpoint_worker import CheckpointWorker
from trainer.pipeline.drafter_worker import NonFiniteError
from trainer.pipeline.queues import Ring
from trainer.pipeline.target_worker import TargetWorker
from trainer.pipeline.types import PipelineError, StepReport, StopOverdueError, TrainState
from trainer.pipeline.worker import Worker
from trainer.run.checkpoint import CheckpointError
from trainer.step.step import DrafterStep
from trainer.target.model import Features, Target

from . import tiny

pytestmark = pytest.mark.timeout(60)


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
        if isinstance(item, tuple) and isinstance(item[0], TrainState):
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


def test_a_failing_hook_ends_the_run_in_its_own_name() -> None:
    def on_step(report: StepReport) -> None:
        if report.step == 3:
            raise OSError("metrics.jsonl: No space left on device")

    failure, _ = fails(on_step=on_step)
    assert failure.worker == "main"
    assert "No space left" in str(failure)


def test_a_hook_that_fails_on_the_last_report_fails_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    original = supervisor.Pipeline._listen

    def listen(self: supervisor.Pipeline, shared: Any, workers: list[Any], group: Any) -> None:
        for worker in workers:
            worker.join(30)  # every report is left for the time after the workers' end
        original(self, shared, workers, group)

    def on_step(report: StepReport) -> None:
        if report.step == 6:
            raise OSError("metrics: No space left on device")

    monkeypatch.setattr(supervisor.Pipeline, "_listen", listen)
    recorder = tiny.Recorder()
    with pytest.raises(PipelineError, match="main failed: OSError: metrics: No space left") as failure:
        tiny.train(tiny.run_config(), recorder, on_step=on_step)
    assert failure.value.stuck == []
    assert [state.step for state in recorder.saved] == [6]


def test_a_thread_that_cannot_be_started_ends_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(Worker, "start", on_call(3, error, Worker.start))
    failure, _ = fails()
    assert failure.worker == "main"
    assert failure.__cause__ is error


@pytest.mark.parametrize(
    "every", [4, 1000]
)  # the checkpoint that is being copied, and the one that the failure asks for
def test_a_large_state_has_the_time_that_copying_it_takes(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.2)
    copying = threading.Event()
    original = DrafterStep.copy_state

    def copy_state(self: DrafterStep) -> Any:
        copying.set()
        time.sleep(1)
        return original(self)

    def on_step(report: StepReport) -> None:
        if report.step == 4:
            assert every > 4 or copying.wait(30)
            raise Boom("listener broke")

    monkeypatch.setattr(DrafterStep, "copy_state", copy_state)
    recorder = tiny.Recorder()
    config = tiny.run_config(optimizer={"max_steps": 1000}, checkpoint={"every": every})
    with pytest.raises(PipelineError, match="listener broke") as failure:
        tiny.train(config, recorder, on_step=on_step)
    assert failure.value.stuck == []
    assert len(recorder.saved) == 1


def test_a_last_checkpoint_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SAVE_SECONDS", 0.2)
    let_go = threading.Event()

    def on_step(report: StepReport) -> None:
        raise Boom("listener broke")

    with pytest.raises(PipelineError) as failure:
        tiny.train(
            tiny.run_config(optimizer={"max_steps": 1000}), on_step=on_step, save=lambda state, sums: let_go.wait(30)
        )
    assert failure.value.stuck == ["checkpoint"]
    let_go.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)


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


@pytest.mark.parametrize(("owner", "name"), [(Target, "features"), (DrafterStep, "accumulate"), (RowSource, "row")])
def test_a_stop_saves_the_last_finished_step_although_a_worker_hangs(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.5)
    let_go, hangs = threading.Event(), threading.Event()
    original = getattr(owner, name)
    calls = count()

    def hang(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == 20:
            hangs.set()
            let_go.wait(60)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, hang)
    recorder = tiny.Recorder()
    config = tiny.run_config(optimizer={"max_steps": 1000}, pipeline={"stop_seconds": 0.5})
    with pytest.raises(PipelineError, match=r"did not end within 0\.5 s of the stop") as failure:
        tiny.train(config, recorder, should_stop=lambda: hangs.is_set() and len(recorder.steps) == 20)
    let_go.set()
    assert isinstance(failure.value.__cause__, StopOverdueError)
    assert len(failure.value.stuck) == 1
    monkeypatch.undo()
    (state,) = recorder.saved
    assert state.step == 20
    undisturbed = tiny.Recorder()
    tiny.train(
        tiny.run_config(optimizer={"max_steps": 1000}, checkpoint={"every": 1}),
        undisturbed,
        should_stop=lambda: len(undisturbed.saved) > state.step,
    )
    same = undisturbed.saved[state.step - 1]
    assert (same.step, same.row, same.tokens) == (state.step, state.row, state.tokens)
    assert all(torch.equal(tensor, state.drafter[name]) for name, tensor in same.drafter.items())
    assert all(torch.equal(tensor, state.optimizer[name]) for name, tensor in same.optimizer.items())


def test_a_target_that_hangs_after_the_last_step_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.5)
    let_go, hangs = threading.Event(), threading.Event()
    original = Target.features

    def features(self: Target, row: Row) -> Features:
        if row.number == 20:
            hangs.set()
            let_go.wait(60)
        return original(self, row)

    monkeypatch.setattr(Target, "features", features)
    config = tiny.run_config(optimizer={"max_steps": 1000}, pipeline={"queue_depth": 30})
    monkeypatch.setattr(DrafterStep, "update", waits_from_step(15, hangs, DrafterStep.update))
    recorder, outcome = tiny.train(config, should_stop=hangs.is_set)
    let_go.set()
    assert outcome.stopped
    assert outcome.stuck == ["target 0"]
    assert [state.step for state in recorder.saved] == [outcome.step]


def waits_from_step(number: int, event: threading.Event, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, whose calls from this number on wait for the event, and a little longer so that it is seen."""
    calls = count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == number:
            assert event.wait(30)
            time.sleep(2 * supervisor.POLL_SECONDS)
        return original(*arguments)

    return call


def test_a_worker_that_hangs_inside_an_update_leaves_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.5)
    let_go, hangs = threading.Event(), threading.Event()
    original, calls = DrafterStep.update, count()

    def hang(step: DrafterStep) -> None:
        if next(calls) == 5:
            hangs.set()
            let_go.wait(60)
        original(step)

    monkeypatch.setattr(DrafterStep, "update", hang)
    recorder = tiny.Recorder()
    config = tiny.run_config(optimizer={"max_steps": 1000}, pipeline={"stop_seconds": 0.5})
    with pytest.raises(PipelineError, match="did not end within"):
        tiny.train(config, recorder, should_stop=hangs.is_set)
    let_go.set()
    assert recorder.saved == []


def spoil(monkeypatch: pytest.MonkeyPatch, *rows: int) -> None:
    """Let the target's features of these rows hold one number that is none."""
    original = Target.features

    def features(self: Target, row: Row) -> Features:
        found = original(self, row)
        if row.number in rows:
            found.hidden[3, 5] = float("nan")
        return found

    monkeypatch.setattr(Target, "features", features)


def test_rows_with_features_that_are_not_finite_are_skipped_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(monkeypatch, 2, 7)
    config = tiny.run_config(optimizer={"max_steps": 5, "gradient_accumulation_steps": 2})
    recorder, outcome = tiny.train(config)
    assert outcome.step == 5
    assert all(torch.isfinite(torch.tensor(recorder.losses)))
    assert [report.skipped_rows for report in recorder.steps] == [0, 1, 1, 2, 2]
    documents = tiny.row_source(config).documents(7)
    assert "row 7 is skipped: the target's features of it are not finite; it holds documents " in caplog.text
    assert ", ".join(map(str, documents)) in caplog.text


def test_a_skipped_row_leaves_the_gradient_of_the_others_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.run_config(optimizer={"max_steps": 1, "gradient_accumulation_steps": 2})
    spoil(monkeypatch, 1)
    skipped, _ = tiny.train(config)
    monkeypatch.undo()
    alone, _ = tiny.train(tiny.run_config(optimizer={"max_steps": 1}))
    assert skipped.losses == alone.losses
    assert skipped.steps[0].grad_norm == alone.steps[0].grad_norm


def test_one_skipped_row_too_many_ends_the_run_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 4, 6, 9)
    with pytest.raises(PipelineError, match=r"3 rows had features .* the last one row 9 .*max_skipped_rows \(2\)"):
        tiny.train(tiny.run_config(optimizer={"max_steps": 1000}, data={"max_skipped_rows": 2}))


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


@dataclass
class Peer:
    """One of two processes of a run; see `peer`."""

    process: ForkServerProcess
    folder: Path

    @property
    def said(self) -> str:
        """How its run ended; empty while it goes on, and after a kill."""
        path = self.folder / "said"
        return path.read_text() if path.exists() else ""

    @property
    def step(self) -> int:
        path = self.folder / "step"
        return int(path.read_text() or "0") if path.exists() else 0

    @property
    def saved(self) -> list[int]:
        return [int(path.name) for path in (self.folder / "saved").iterdir()]

    def ends(self, seconds: float) -> int | None:
        """Its exit code, None if it does not end in time."""
        self.process.join(seconds)
        return self.process.exitcode


@pytest.fixture
def two_processes(tmp_path: Path) -> Iterator[Callable[..., list[Peer]]]:
    """Starts a run of two processes whose process `number` plays a scenario of `peer`, and the other its reverse."""
    started: list[Peer] = []

    def start(scenario: str, number: int = 1) -> list[Peer]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(2):
            folder = tmp_path / str(rank)
            (folder / "saved").mkdir(parents=True)
            arguments = (scenario, rank == number, rank, port, folder)
            process = CONTEXT.Process(target=peer, args=arguments)
            process.start()
            started.append(Peer(process, folder))
        return started

    yield start
    for one in started:
        one.process.kill()
        one.process.join()


def peer(scenario: str, plays: bool, rank: int, port: int, folder: Path) -> None:
    """One of two processes. The one that plays the scenario does what the name says after its ninth step."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    steps = 60 if scenario == "busy" else 100_000
    load = tiny.load_target
    if plays and scenario == "exception":
        TargetWorker._deliver = on_call(9, Boom("it breaks"), TargetWorker._deliver)  # type: ignore[method-assign]
    if plays and scenario == "exception while loading":
        load = on_call(1, Boom("no such weights"), tiny.load_target)
    if scenario == "kill in a collective without end":  # NCCL's do not see that a peer is gone
        calls, original = count(), Collective.all_reduce

        def all_reduce(self: Collective, buffer: torch.Tensor) -> None:
            if next(calls) == 9:
                if plays:
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()
            original(self, buffer)

        Collective.all_reduce = all_reduce  # type: ignore[method-assign]

    def on_step(report: StepReport) -> None:
        (folder / "step").write_text(str(report.step))
        if plays and report.step == 9:
            if scenario == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if scenario == "busy":
                ctypes.PyDLL(None).sleep(4)  # no other thread of this process runs meanwhile

    def save(state: TrainState, sums: torch.Tensor | None) -> None:
        (folder / "saved" / str(state.step)).touch()

    config = tiny.run_config(optimizer={"max_steps": steps}, checkpoint={"every": 4})
    try:
        _, outcome = tiny.train(config, on_step=on_step, save=save, load_target=load)
    except (PipelineError, SetupError, Boom) as error:
        (folder / "said").write_text(str(error))
        os._exit(1)
    (folder / "said").write_text(f"finished at {outcome.step}")


def died(number: int) -> str:
    return f"another process failed: PeerError: process {number} on {socket.gethostname()} died without a word"


@pytest.mark.parametrize("number", [0, 1])  # process 0 serves the store
def test_a_process_that_is_killed_is_named_by_the_one_that_is_left(
    number: int, two_processes: Callable[..., list[Peer]]
) -> None:
    peers = two_processes("kill", number)
    assert peers[number].ends(60) == -signal.SIGKILL
    assert peers[1 - number].ends(10) == 1
    assert peers[1 - number].said == died(number)
    if number == 1:  # process 0 saves: what it has, up to the step that was not added up
        assert max(peers[0].saved) >= 9


@pytest.mark.parametrize("number", [0, 1])
def test_a_collective_that_never_returns_does_not_hold_the_process_that_is_left(
    number: int, two_processes: Callable[..., list[Peer]]
) -> None:
    peers = two_processes("kill in a collective without end", number)
    assert peers[number].ends(60) == -signal.SIGKILL
    assert peers[1 - number].ends(10) == 1
    assert peers[1 - number].said == died(number)


def test_a_failure_in_one_process_is_told_by_all_in_its_words(two_processes: Callable[..., list[Peer]]) -> None:
    peers = two_processes("exception")
    assert [one.ends(60) for one in peers] == [1, 1]
    assert peers[1].said == "target 0 failed: Boom: it breaks"
    host = socket.gethostname()
    assert peers[0].said == f"another process failed: PeerError: process 1 on {host}: {peers[1].said}"


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_fails_while_loading_does_not_hold_the_others(
    number: int, two_processes: Callable[..., list[Peer]]
) -> None:
    peers = two_processes("exception while loading", number)
    assert [one.ends(60) for one in peers] == [1, 1]
    assert peers[number].said == "no such weights"
    assert f"process {number} on {socket.gethostname()}: main failed: Boom: no such weights" in peers[1 - number].said


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_busy_or_stopped_for_seconds_is_not_taken_for_dead(
    number: int, two_processes: Callable[..., list[Peer]]
) -> None:
    peers = two_processes("busy", number)
    other = peers[1 - number].process.pid
    assert other is not None
    while peers[number].step < 10 and peers[number].process.is_alive():
        time.sleep(0.01)
    os.kill(other, signal.SIGSTOP)
    time.sleep(4)
    os.kill(other, signal.SIGCONT)
    assert [one.ends(60) for one in peers] == [0, 0], [one.said for one in peers]
    assert [one.said for one in peers] == ["finished at 60"] * 2
