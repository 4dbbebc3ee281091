"""`python -m trainer run`: killed, stopped, asked for checkpoints, resumed, and failing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.launching import Run, command, launch, python, ranks, write_config
from tests.trainer.tiny_models import VOCAB, save_target, tiny_target
from trainer.run import checkpoint

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) \S+ \S.*")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tiny_target("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    with path.open("w") as file:
        for length in range(12, 40, 2):
            ids = torch.randint(6, VOCAB - 1, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)}) + "\n")
    return path


@pytest.fixture
def config(tmp_path: Path, target: Path, source: Path) -> Path:
    return write_config(tmp_path / "run.yaml", target, source)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, target: Path, source: Path) -> Run:
    """A whole run of 40 steps, nothing done to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = launch(write_config(folder / "run.yaml", target, source), folder)
    assert run.wait() == 0, run.log
    return run


def losses(run: Run) -> dict[int, set[float]]:
    """Every loss that was ever written for a step; more than one value means that a repetition differed."""
    found: dict[int, set[float]] = {}
    for line in run.steps:
        found.setdefault(line["step"], set()).add(line["loss"])
    return found


def weights(run: Run, step: int) -> bytes:
    return (run.folder / f"checkpoints/step-{step:08d}" / checkpoint.MODEL).read_bytes()


def test_a_run_learns_and_leaves_what_the_launcher_reads(undisturbed: Run) -> None:
    steps = undisturbed.steps
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert sum(line["loss"] for line in steps[-5:]) < 0.8 * sum(line["loss"] for line in steps[:5])
    assert undisturbed.checkpoints == [40]
    assert {report["worker"] for report in json.loads((undisturbed.folder / "compile.json").read_text())} == {
        "target 0",
        "drafter 0",
    }
    lines = undisturbed.log.splitlines()
    assert all(LOG_LINE.fullmatch(line) for line in lines), undisturbed.log
    assert any("main step 40/40 loss " in line for line in lines)


def test_twenty_kills_at_random_instants_change_no_bit_of_the_losses(
    tmp_path: Path, target: Path, source: Path, undisturbed: Run
) -> None:
    config = write_config(tmp_path / "run.yaml", target, source, checkpoint={"every": 2, "keep_last": 2})
    rng = random.Random(0)
    killed_while_training = 0
    for _ in range(20):
        run = launch(config, tmp_path / "run")
        written = len(run.steps)
        # From before the first step to some steps behind it, whatever the machine's speed.
        for _ in range(rng.randrange(5)):
            with contextlib.suppress(AssertionError):  # it may have come to its end
                run.until(lambda run=run, before=written: len(run.steps) > before)  # type: ignore[misc]
            written = len(run.steps)
        time.sleep(0.03 * rng.random())
        run.kill(signal.SIGKILL)
        killed_while_training += run.wait() == -signal.SIGKILL
    run = launch(config, tmp_path / "run")
    assert run.wait() == 0, run.log
    assert killed_while_training > 10
    assert len([line for line in run.metrics if line["kind"] == "resume"]) > 5
    assert losses(run) == losses(undisturbed)
    assert weights(run, 40) == weights(undisturbed, 40)


def test_sigusr2_saves_and_goes_on_and_sigterm_saves_and_ends_with_zero(
    tmp_path: Path, config: Path, undisturbed: Run
) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000")
    run.until(lambda: len(run.steps) >= 2)
    run.kill(signal.SIGUSR2)
    run.until(lambda: bool(run.checkpoints))
    asked = run.checkpoints[0]
    run.until(lambda: run.steps[-1]["step"] > asked)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log
    last = run.steps[-1]["step"]
    assert run.checkpoints == [asked, last]
    assert f"stopped at step {last} of 6000" in run.log
    assert checkpoint.read(run.folder / f"checkpoints/step-{last:08d}").run()["next_row"] == last


def test_conversations_held_out_are_measured_logged_and_decide_what_is_best(
    tmp_path: Path, config: Path, source: Path, undisturbed: Run
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(source.read_text().splitlines(keepends=True)[::-2]))
    wishes = [f"data.held_out={other}", "data.held_out_every=8", "checkpoint.every=10", "checkpoint.keep_last=1"]
    run = launch(config, tmp_path / "run", "--set", *wishes)
    assert run.wait() == 0, run.log
    assert losses(run) == losses(undisturbed)
    assert weights(run, 40) == weights(undisturbed, 40)
    lines = [line for line in run.metrics if line["kind"] == "held_out"]
    assert [line["step"] for line in lines] == [8, 10, 16, 20, 24, 30, 32, 40]
    assert all(line["loss"] > 0 and line["accept_length"] >= 1 for line in lines)
    assert f"step 40 held out: loss {lines[-1]['loss']:.3f} accept {lines[-1]['accept_length']:.2f}, 3 rows" in run.log
    lengths = {line["step"]: line["accept_length"] for line in lines if line["step"] % 10 == 0}
    best = max(lengths, key=lambda step: (lengths[step], step))
    assert run.checkpoints == sorted({best, 40})
    found = checkpoint.resolve(tmp_path / "run" / "best")
    assert (found.step, found.metrics["held_out_accept_length"]) == (best, lengths[best])


def test_a_share_is_held_out_and_a_resumed_run_holds_out_the_same(tmp_path: Path, config: Path) -> None:
    wishes = ["--set", "data.held_out=0.3", "data.held_out_every=5"]
    whole = launch(config, tmp_path / "whole", *wishes)
    assert whole.wait() == 0, whole.log
    run = launch(config, tmp_path / "stopped", *wishes, "checkpoint.every=16")
    run.until(lambda: 16 in run.checkpoints or len(run.steps) > 17)
    run.kill(signal.SIGKILL)
    run.wait()
    run = launch(config, tmp_path / "stopped", *wishes, "checkpoint.every=16")
    assert run.wait() == 0, run.log
    assert "something changed" not in run.log
    assert losses(run) == losses(whole)
    measured = [
        {line["step"]: line["loss"] for line in each.metrics if line["kind"] == "held_out" and line["step"] % 5 == 0}
        for each in (whole, run)
    ]
    assert measured[0] == measured[1]
    assert list(measured[0]) == list(range(5, 41, 5))


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    run = launch(config, tmp_path / "run")
    run.until(lambda: len(run.steps) >= 5)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log
    stopped = run.steps[-1]["step"]
    assert stopped < 40
    resumed = launch(config, tmp_path / "run")
    assert resumed.wait() == 0, resumed.log
    assert [line["step"] for line in resumed.steps] == list(range(1, 41))
    assert losses(resumed) == losses(undisturbed)
    assert f"resuming from step {stopped}" in resumed.log


def test_another_run_is_continued_from_and_left_alone(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    before = {path: path.read_bytes() for path in undisturbed.folder.rglob("*") if path.is_file()}
    run = launch(
        config,
        tmp_path / "run",
        "--resume-from",
        str(undisturbed.folder),
        "--set",
        "optimizer.max_steps=43",
        "optimizer.on_schedule_change=adopt",
    )
    assert run.wait() == 0, run.log
    assert [line["step"] for line in run.steps] == [41, 42, 43]
    assert run.checkpoints == [43]
    assert {path: path.read_bytes() for path in undisturbed.folder.rglob("*") if path.is_file()} == before


def test_what_changed_since_the_checkpoint_is_said(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    changes = ["optimizer.max_steps=41", "optimizer.gradient_accumulation_steps=2", "optimizer.lr=1e-4", "data.seed=1"]
    changes.append("optimizer.on_schedule_change=adopt")
    run = launch(config, tmp_path / "run", "--resume-from", str(undisturbed.folder), "--set", *changes)
    assert run.wait() == 0, run.log
    for said in (
        "optimizer.gradient_accumulation_steps was 1, is 2",
        "optimizer.lr was 0.003, is 0.0001",
        "data.seed was 0, is 1",
        "the data changed",
        "rows a step: 1 before, 2 now",
    ):
        assert said in run.log
    assert "the target's files" not in run.log


@pytest.mark.parametrize(
    "change", ["pipeline.drafters=[cpu,cpu]", "optimizer.gradient_accumulation_steps=2", "two processes"]
)
def test_another_batch_goes_on_at_the_saved_row_and_the_saved_rate(
    tmp_path: Path, target: Path, source: Path, change: str
) -> None:
    config = write_config(tmp_path / "run.yaml", target, source, data={"epochs": 50}, optimizer={"max_steps": None})
    first = launch(config, tmp_path / "run", "--set", "checkpoint.every=1")
    first.until(lambda: len(first.steps) >= 40)
    first.kill(signal.SIGTERM)
    assert first.wait() == 0, first.log
    saved = checkpoint.resolve(first.folder)
    row = saved.run()["next_row"]
    assert row == saved.step < 300
    rates = {line["step"]: line["lr"] for line in first.steps}
    before = len(rates)
    if change == "two processes":
        runs = [launch(config, tmp_path / "run", **rank) for rank in ranks()]
    else:
        runs = [launch(config, tmp_path / "run", "--set", change)]
    assert [run.wait() for run in runs] == [0] * len(runs), runs[0].log
    after = runs[0].steps[before:]
    assert f"resuming from step {saved.step}, row {row}" in runs[0].log
    assert len(after) == (300 - row) // 2
    last = checkpoint.resolve(first.folder).run()
    assert last["next_row"] == row + 2 * len(after)
    assert last["schedule"] == {"rows": 300, "rows_per_step": 1}
    assert rates[saved.step] > after[0]["lr"] > 0.9 * rates[saved.step]


def test_tokens_are_counted_over_resumes(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    run = launch(config, tmp_path / "run")
    run.until(lambda: len(run.steps) >= 5)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log
    resumed = launch(config, tmp_path / "run")
    assert resumed.wait() == 0, resumed.log
    tokens = checkpoint.resolve(undisturbed.folder).run()["tokens"]
    assert checkpoint.resolve(resumed.folder).run()["tokens"] == tokens > 40 * 40


def test_a_learning_rate_that_would_jump_is_refused_unless_accepted(
    tmp_path: Path, config: Path, undisturbed: Run
) -> None:
    words = ("--resume-from", str(undisturbed.folder), "--set", "optimizer.max_steps=80")
    run = launch(config, tmp_path / "refused", *words)
    assert run.wait() == 78, run.log
    assert "the learning rate would jump from 0.0003 to 0.00" in run.log.splitlines()[-1]
    for wish, low, high in (("keep", 2.9e-4, 3.1e-4), ("adopt", 1.5e-3, 3e-3)):
        run = launch(config, tmp_path / wish, *words, f"optimizer.on_schedule_change={wish}")
        run.until(lambda run=run: bool(run.steps))  # type: ignore[misc]
        assert low < run.steps[0]["lr"] < high
        run.kill(signal.SIGTERM)
        assert run.wait() == 0, run.log


def test_a_second_process_in_a_run_directory_is_refused_and_does_no_harm(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000")
    run.until(lambda: bool(run.steps))
    code, said = command(tmp_path / "log", "run", str(config), "--run-dir", str(tmp_path / "run"))
    assert code == 78, said
    assert "another process trains in" in said.splitlines()[-1]
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log


def test_a_checkpoint_of_another_run_in_the_folder_is_refused(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=3")
    assert run.wait() == 0, run.log
    foreign = undisturbed.folder / "checkpoints/step-00000040"
    shutil.copytree(foreign, tmp_path / "run/checkpoints/step-00000040")
    again = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=50")
    assert again.wait() == 78, again.log
    assert "step-00000040 is another run's: move it out of" in again.log.splitlines()[-1]


def test_a_checkpoint_is_written_when_its_minutes_are_over(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000", "checkpoint.minutes=0.001")
    run.until(lambda: len(run.checkpoints) >= 2)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log


def test_a_stop_ends_a_run_whose_target_hangs_and_saves_its_last_step(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run", "--set", "pipeline.stop_seconds=0.5", prepare=a_target_that_sticks)
    run.until(lambda: len(run.steps) == 5)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log
    assert "did not end within 0.5 s of the stop" in run.log
    assert "did not end in time: target 0; their stacks:" in run.log
    assert "Traceback" not in run.log
    assert run.checkpoints == [5]


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    run = launch(config, tmp_path / "run", "--set", "checkpoint.every=10", "optimizer.max_steps=40")
    assert run.wait() == 0, run.log
    victim = tmp_path / "run/checkpoints/step-00000040" / checkpoint.OPTIMIZER
    victim.write_bytes(victim.read_bytes()[:-100])
    resumed = launch(config, tmp_path / "run")
    assert resumed.wait() == 0, resumed.log
    assert "step-00000040 is damaged" in resumed.log
    assert "resuming from step 30" in resumed.log
    assert losses(resumed) == losses(undisturbed)
    assert weights(resumed, 40) == weights(undisturbed, 40)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    run = launch(config, tmp_path / "run", "--resume-from", str(undisturbed.folder))
    assert run.wait() == 0, run.log
    assert run.steps == []
    assert run.log.splitlines()[-1].endswith(
        "finished before, at step 40 of 40: a greater optimizer.max_steps continues it"
    )
    assert "loading the target" not in run.log
    assert not (run.folder / "metrics.jsonl").exists()


def test_the_log_says_why_a_run_has_so_many_steps(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    assert " INFO main 40 steps, by optimizer.max_steps, of 6000: 1000 epochs of 6 rows\n" in undisturbed.log
    assert "14 of 14 records can be trained on: 350 tokens, 294 supervised; 6 rows an epoch, 91.1 % full" in (
        undisturbed.log
    )
    changes = ["data.epochs=1", "data.sequence_length=8000", "data.anchors_per_row=16", "drafter.num_layers=1"]
    run = launch(config, tmp_path / "run", "--set", *changes)
    assert run.wait() == 0, run.log
    assert " 1 step: 1 epoch of 1 row (optimizer.max_steps 40 is not reached)\n" in run.log
    assert "drafter of 1 layer, " in run.log
    assert "1 row an epoch, 4.4 % full\n" in run.log
    assert "lower data.sequence_length, to about 350\n" in run.log


def test_documents_beyond_the_target_s_positions_are_warned_of(tmp_path: Path, config: Path, source: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"input_ids": [7, 8, 9] * 100, "loss_mask": [1] * 300}) + "\n")
    changes = [f"data.sources=[{path}]", "data.sequence_length=320", "optimizer.max_steps=1"]
    run = launch(config, tmp_path / "run", "--set", *changes)
    assert run.wait() == 0, run.log
    assert "has 300 tokens, the target is made for 256 positions" in run.log
    assert "set data.max_document_length to 256" in run.log


def test_ctrl_c_saves_and_ends_with_130_and_a_second_one_says_so_in_one_line(
    tmp_path: Path, config: Path, undisturbed: Run
) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000")
    run.until(lambda: len(run.steps) >= 2)
    run.kill(signal.SIGINT)
    assert run.wait() == 130, run.log
    assert run.checkpoints == [run.steps[-1]["step"]]
    stuck = launch(config, tmp_path / "stuck", prepare=a_target_that_sticks)
    stuck.until(lambda: len(stuck.steps) == 5)
    for said in ("finishing the step", "second Ctrl-C"):
        stuck.kill(signal.SIGINT)
        stuck.until(lambda said=said: said in stuck.log or not stuck.process.is_alive())  # type: ignore[misc]
    assert stuck.wait() == 130, stuck.log
    assert "Traceback" not in stuck.log
    assert "ERROR" not in stuck.log
    assert "second Ctrl-C: left without finishing the step" in stuck.log.splitlines()[-1]
    assert stuck.checkpoints == [5]


def test_ctrl_c_before_training_ends_with_130(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000")
    run.until(lambda: (run.folder / "log").exists() and "can be trained on" in run.log)
    run.kill(signal.SIGINT)
    assert run.wait() == 130, run.log


def test_a_released_drafter_is_trained_on(tmp_path: Path, config: Path, undisturbed: Run) -> None:
    released = undisturbed.folder / "checkpoints/step-00000040"
    run = launch(config, tmp_path / "run", "--set", f"drafter.init_from={released}", "optimizer.max_steps=1")
    assert run.wait() == 0, run.log
    assert run.steps[0]["step"] == 1
    assert run.steps[0]["loss"] < 0.8 * undisturbed.steps[0]["loss"]


def test_two_processes_share_a_run_directory_and_write_what_one_with_two_drafters_writes(
    tmp_path: Path, target: Path, source: Path
) -> None:
    sections = {"optimizer": {"max_steps": 12}, "checkpoint": {"every": 6}}
    both = {"pipeline": {"drafters": ["cpu", "cpu"]}}
    one = launch(write_config(tmp_path / "one.yaml", target, source, **sections, **both), tmp_path / "one")
    assert one.wait() == 0, one.log
    config = write_config(tmp_path / "two.yaml", target, source, **sections)
    for last in (6, 12):  # the second time, they resume
        # The schedule spans 12 steps in any case; the first time, a stop is asked for when 6 are done.
        runs = [launch(config, tmp_path / "two", **rank) for rank in ranks()]
        if last == 6:
            runs[0].until(lambda run=runs[0]: len(run.steps) >= 6)  # type: ignore[misc]
            runs[1].kill(signal.SIGTERM)
        assert [run.wait() for run in runs] == [0, 0], runs[0].log
    two = runs[0]
    log = (tmp_path / "two/log").read_text()  # of both
    for alike in ("can be trained on", "drafter of 2 layers", "loading the target"):
        lines = [line for line in log.splitlines() if alike in line]
        assert len(lines) == 2, lines  # each time once
        assert all(" INFO 0:main " in line for line in lines)
    assert " INFO 1:main process 1 of 2 meets the others at 127.0.0.1:" in log
    assert [line["step"] for line in two.steps] == list(range(1, 13))
    assert losses(two) == losses(one)
    assert weights(two, 12) == weights(one, 12)


def two_processes(config: Path, folder: Path, *changes: str, prepare: Callable[[], None] | None = None) -> list[Run]:
    """A long run of two processes, each with a run directory of its own."""
    arguments = ("--set", "optimizer.max_steps=6000", *changes)
    return [launch(config, folder / rank["RANK"], *arguments, prepare=prepare, **rank) for rank in ranks()]


DIED = f"another process failed: PeerError: process 1 on {socket.gethostname()} died without a word"


def test_the_death_of_another_process_is_the_error_of_a_run(tmp_path: Path, config: Path) -> None:
    runs = two_processes(config, tmp_path)
    runs[0].until(lambda: len(runs[0].steps) >= 3)
    runs[1].kill(signal.SIGKILL)
    assert runs[0].wait() == 1
    errors = [line.partition(" ERROR ")[2] for line in runs[0].log.splitlines() if " ERROR " in line]
    assert errors == [f"0:main {DIED}", f"0:main run failed: {DIED}"]
    assert runs[0].checkpoints, "what was trained is lost"


def test_a_collective_that_never_returns_does_not_keep_a_process_from_ending(tmp_path: Path, config: Path) -> None:
    runs = two_processes(config, tmp_path, "checkpoint.every=2", prepare=a_collective_without_end)
    assert runs[1].wait() == -signal.SIGKILL
    killed = time.monotonic()
    assert runs[0].wait() == 1
    assert time.monotonic() - killed < 10
    assert runs[0].log.splitlines()[-1].endswith(f"run failed: {DIED}")
    assert "ERROR 0:main did not end in time: drafter 0; their stacks:" in runs[0].log
    assert "in without_end" in runs[0].log
    assert runs[0].checkpoints == [2, 4, 5]


def a_collective_without_end() -> None:
    """In a run's process: process 1 is killed in the sixth sum, and like NCCL's that of process 0 waits for it."""
    from trainer.exchange.reduce import Collective

    sums, original = itertools.count(), Collective.all_reduce

    def without_end(self: Collective, buffer: torch.Tensor) -> None:
        if next(sums) == 6:  # the first one connects
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        original(self, buffer)

    Collective.all_reduce = without_end  # type: ignore[method-assign]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        yield receiver


def test_the_service_manager_hears_of_progress(tmp_path: Path, config: Path, manager: socket.socket) -> None:
    run = launch(
        config,
        tmp_path / "run",
        "--set",
        "optimizer.max_steps=6000",
        NOTIFY_SOCKET=str(tmp_path / "notify"),
        WATCHDOG_USEC="2000000",
    )
    heard: list[str] = []
    while not heard or not heard[-1].startswith("STATUS=step 5/"):
        heard.append(manager.recv(4096).decode())
    run.kill(signal.SIGTERM)
    while heard[-1] != "STOPPING=1":
        heard.append(manager.recv(4096).decode())
    assert run.wait() == 0, run.log
    assert "STATUS=preparing drafter 1/1" in heard
    assert any(re.fullmatch(r"STATUS=step 5/6000 loss \d+\.\d+ accept \d\.\d+ \S+ tok/s", text) for text in heard)
    assert heard.index("READY=1") > heard.index("STATUS=preparing drafter 1/1")
    assert "WATCHDOG=1" in heard
    # The long silences before the first step and after the stop are announced, the unit's own period is given back.
    periods = [text for text in heard if text.startswith("WATCHDOG_USEC=")]
    assert periods == ["WATCHDOG_USEC=21600000000", "WATCHDOG_USEC=2000000"]


def test_the_service_manager_lets_a_run_that_failed_save(tmp_path: Path, config: Path, manager: socket.socket) -> None:
    run = launch(
        config,
        tmp_path / "run",
        prepare=a_target_that_breaks,
        NOTIFY_SOCKET=str(tmp_path / "notify"),
        WATCHDOG_USEC="2000000",
    )
    heard: list[str] = []
    while heard[-3:] != ["STOPPING=1", "WATCHDOG_USEC=1800000000", "WATCHDOG=1"]:
        heard.append(manager.recv(4096).decode())
    assert run.wait() == 1, run.log
    assert len(run.checkpoints) == 1


def a_target_that_breaks() -> None:
    """In a run's process: its target fails at the sixth row."""
    from trainer.pipeline.target_worker import TargetWorker

    rows, original = itertools.count(), TargetWorker._deliver

    def deliver(self: TargetWorker, features: Any, place: Any) -> Any:
        if next(rows) == 5:
            raise ValueError("no such row")
        return original(self, features, place)

    TargetWorker._deliver = deliver  # type: ignore[method-assign]


def test_a_stop_before_training_leaves_nothing_and_ends_with_zero(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run")
    run.until(lambda: (run.folder / "log").exists() and "can be trained on" in run.log)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log
    assert not run.checkpoints or "stopped at step" in run.log  # it may just have begun


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_while_other_processes_are_awaited_ends_the_waiting(tmp_path: Path, config: Path, rank: int) -> None:
    run = launch(config, tmp_path, **ranks()[rank])
    run.until(lambda: (tmp_path / "log").exists() and f"process {rank} of 2 meets the others" in run.log)
    time.sleep(1)
    run.kill(signal.SIGTERM)
    asked = time.monotonic()
    assert run.wait() == 0, run.log
    assert time.monotonic() - asked < 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 78), (signal.SIGTERM, 0)])
def test_a_signal_while_torch_is_imported_does_not_kill(tmp_path: Path, number: int, code: int) -> None:
    # An import hook sends the signal in the first moment of importing torch, which is when `run` needs it.
    program = (
        "import os, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'torch': sys.meta_path.remove(self); os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Hook())\n"
        "from trainer.__main__ import main\n"
        f"sys.exit(main(['run', {str(tmp_path / 'absent.yaml')!r}, '--run-dir', {str(tmp_path / 'run')!r}]))\n"
    )
    finished = python("-c", program)
    assert finished.returncode == code, finished.stderr


def test_the_stacks_of_a_healthy_run_can_be_asked_for(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000")
    run.until(lambda: bool(run.steps))
    run.kill(signal.SIGUSR1)
    run.until(lambda: "most recent call first" in run.log)
    count = len(run.steps)
    run.until(lambda: len(run.steps) > count)
    assert "Fatal Python error" not in run.log
    run.kill(signal.SIGTERM)
    assert run.wait() == 0, run.log


def test_an_abort_of_a_stuck_run_leaves_every_threads_stack_in_the_log(tmp_path: Path, config: Path) -> None:
    # Stuck, as every run is that the watchdog aborts: reading the frames of threads that still run can itself crash.
    run = launch(config, tmp_path / "run", "--set", "optimizer.max_steps=6000", prepare=a_target_that_sticks)
    run.until(lambda: len(run.steps) == 5)
    time.sleep(0.5)  # for the other threads to come to where they wait
    run.kill(signal.SIGABRT)
    assert run.wait() == -signal.SIGABRT
    stacks = run.log.partition("Fatal Python error: Aborted")[2]
    assert len(re.findall(r"^(?:Current thread|Thread) 0x", stacks, re.MULTILINE)) >= 5  # main and the four workers
    for where in ("in _listen", "in a_stuck_delivery", "in reserve", "in take"):
        assert where in stacks, stacks


def a_target_that_sticks() -> None:
    """In a run's process: its targets deliver five rows, and never another."""
    from trainer.pipeline.target_worker import TargetWorker

    rows, original = itertools.count(), TargetWorker._deliver

    def a_stuck_delivery(self: TargetWorker, features: Any, place: Any) -> Any:
        if next(rows) == 5:
            threading.Event().wait()
        return original(self, features, place)

    TargetWorker._deliver = a_stuck_delivery  # type: ignore[method-assign]


def test_a_full_disk_ends_the_run_with_the_cause_first_and_the_old_checkpoint_whole(
    tmp_path: Path, config: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    try:
        run = launch(
            config, folder, "--set", "optimizer.max_steps=6000", "checkpoint.every=5", "checkpoint.keep_last=9"
        )
        assert run.wait() == 1, run.log
        errors = [line for line in run.log.splitlines() if " ERROR " in line]
        assert "checkpoint failed: CheckpointError: checkpoint of step" in errors[0]
        assert "the disk is full" in errors[0]
        assert "run failed: checkpoint failed: CheckpointError: checkpoint of step" in errors[-1]
        assert "Traceback" not in run.log
        found = checkpoint.newest_valid(folder / "checkpoints")
        assert found is not None
        assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")] == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_fault_in_a_worker_ends_the_run_with_its_traceback_and_a_checkpoint(
    tmp_path: Path, target: Path, source: Path
) -> None:
    # A token id outside the vocabulary is refused by the embedding, in the target's thread, in the middle of the run.
    path = tmp_path / "documents.jsonl"
    path.write_bytes(source.read_bytes())
    config = write_config(tmp_path / "run.yaml", target, path, optimizer={"max_steps": 6000})
    run = launch(config, tmp_path / "run")
    run.until(lambda: len(run.steps) >= 3)
    for cached in path.parent.rglob("tokens.i32"):  # mapped by the run: from now on its rows hold nonsense
        with cached.open("r+b") as file:  # in place: a mapped file that shrinks would be a SIGBUS
            file.write(b"\x7f" * cached.stat().st_size)
    assert run.wait() == 1, run.log
    first = next(line for line in run.log.splitlines() if " ERROR " in line)
    assert first.endswith("ERROR target-0 target 0 failed"), run.log
    assert run.log.partition(first + "\n")[2].startswith("Traceback (most recent call last)")
    assert "run failed: target 0 failed: IndexError: " in run.log.splitlines()[-1]
    assert checkpoint.newest_valid(run.folder / "checkpoints") is not None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("optimizer.lrr=1", r"lrr.*lr"),
        ("target.path=/nowhere", r"target\.path: there is no folder /nowhere$"),
        ("target.path=~/nowhere", r"there is no folder ~/nowhere; write the home folder out"),
        ("target.path=nowhere", r"there is no folder nowhere in /.*, and the model hub does not answer$"),
        ("target.gguf_file=a.gguf", r"target\.gguf_file: there is no file /.*/a\.gguf$"),
        ("data.sources=[/nowhere.jsonl]", r"data\.sources: there is no file /nowhere\.jsonl$"),
        ("data.chat_template=/nowhere.jinja", r"data\.chat_template: there is no file /nowhere\.jinja$"),
        ("drafter.target_layer_ids=[99]", r"99"),
        ("pipeline.drafters=[cuda:63]", r"pipeline\.drafters: there is no cuda:63: this machine has "),
        ("pipeline.targets=[gpu]", r"pipeline\.targets: 'gpu' is no device: write cpu or cuda:0"),
        ("telemetry.wandb=true", r"dflash-ops\[wandb\]"),
        ("drafter.init_from=/nowhere", r"drafter\.init_from: there is no folder /nowhere$"),
        (
            "drafter.init_from=nobody/nothing",
            r"init_from: there is no nobody/nothing in .*, and the model hub does not",
        ),
        (
            "data.sources=[nobody/nothing]",
            r"data\.sources: there is no nobody/nothing in .*, and the model hub does not",
        ),
    ],
)
def test_a_bad_input_is_one_sentence_and_78(tmp_path: Path, config: Path, change: str, sentence: str) -> None:
    run = launch(config, tmp_path / "run", "--set", change, HF_ENDPOINT="http://127.0.0.1:1")
    assert run.wait() == 78, run.log
    assert "Traceback" not in run.log
    assert not run.metrics
    (error,) = [line for line in run.log.splitlines() if " ERROR " in line]
    assert re.search(sentence, error), error


def test_a_resume_from_nowhere_is_refused(tmp_path: Path, config: Path) -> None:
    run = launch(config, tmp_path / "run", "--resume-from", str(tmp_path / "nothing"))
    assert run.wait() == 78
    assert f"there is no folder {tmp_path / 'nothing'}" in run.log


def test_a_checkpoint_of_another_drafter_or_optimizer_is_refused_with_the_cure(
    tmp_path: Path, config: Path, undisturbed: Run
) -> None:
    for change, difference in (
        ("optimizer.name=muon", "optimizer.name is adamw there, muon here"),
        ("drafter.num_layers=1", "optimizer (drafter num_hidden_layers is 2 there, 1 here): keep"),
        ("drafter.block_size=8", "optimizer (drafter block_size is 4 there, 8 here): keep"),
    ):
        run = launch(config, tmp_path / change, "--resume-from", str(undisturbed.folder), "--set", change)
        assert run.wait() == 78, run.log
        assert "Traceback" not in run.log
        assert difference in run.log
        assert "start a new run in another run directory" in run.log


def test_a_start_that_fails_leaves_no_run_directory_and_one_line(tmp_path: Path, config: Path) -> None:
    hub = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    for change, reason in (
        ("target.path=nowhere", "the model hub does not answer"),
        ("data.sources=[nowhere.jsonl]", "there is no file nowhere.jsonl"),
        ("drafter.target_layer_ids=[99]", "99"),
    ):
        words = ("-m", "trainer", "run", str(config), "--run-dir", str(tmp_path / "run"), "--set", change)
        finished = python(*words, **hub)
        assert finished.returncode == 78, finished.stderr
        assert reason in finished.stderr.splitlines()[-1]
        assert "Retrying" not in finished.stderr
        assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there_is_noticed_before_anything_is_read(tmp_path: Path, config: Path) -> None:
    compiled = ("--set", "pipeline.mode=compiled")
    for words in (
        ("warmup", str(config), "--devices", "cuda:63", *compiled),
        ("warmup", str(config), *compiled, "pipeline.targets=[cuda:63]"),
        ("bench", "step", "--device", "cuda:63"),
        ("evaluate", str(tmp_path), "--prompts", str(config), "--device", "cuda:63"),
        ("regenerate", str(config), "--prompts", str(config), "--output", "x", "--set", "pipeline.targets=[cuda:63]"),
    ):
        code, said = command(tmp_path / "log", *words)
        assert code == 78, said
        assert "there is no cuda:63: this machine has " in said
        assert len(said.splitlines()) == 1, said


def test_a_warmup_of_an_eager_run_is_refused(tmp_path: Path, config: Path) -> None:
    code, said = command(tmp_path / "log", "warmup", str(config))
    assert code == 78, said
    assert "set it to graph or compiled" in said
