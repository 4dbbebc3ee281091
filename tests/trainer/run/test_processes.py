"""`python -m trainer run` as several processes: how they begin, and how they end when one does not."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.launching import Run, launch, ranks, write_config
from tests.trainer.tiny_models import VOCAB, save_target, tiny_target
from trainer.run import checkpoint

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    generator = torch.Generator().manual_seed(0)
    with (folder / "documents.jsonl").open("w") as file:
        for length in range(12, 40, 2):
            ids = torch.randint(6, VOCAB - 1, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)}) + "\n")
    target = save_target(tiny_target("llama"), folder / "target")
    return write_config(folder / "run.yaml", target, folder / "documents.jsonl", optimizer={"max_steps": 4})


def start(
    config: Path,
    folder: Path,
    arguments: list[list[str]],
    *,
    prepare: Callable[[], None] | None = None,
    sizes: tuple[int, ...] = (2, 2),
) -> list[Run]:
    """One process for each list of arguments, each with a run directory of its own."""
    return [
        launch(config, folder / rank["RANK"], *words, prepare=prepare, **rank | {"WORLD_SIZE": str(size)})
        for rank, words, size in zip(ranks(), arguments, sizes, strict=True)
    ]


def last_line(run: Run) -> str:
    return run.log.splitlines()[-1]


def test_another_target_type_in_one_process_is_refused_by_all(tmp_path: Path, config: Path) -> None:
    runs = start(config, tmp_path, [[], ["--set", "target.dtype=bfloat16"]])
    assert [run.wait() for run in runs] == [78, 78]
    for run in runs:
        assert "process 0 has target.dtype float32 and process 1 has bfloat16: give all" in last_line(run)


def test_checkpoints_of_different_runs_are_refused_by_all(tmp_path: Path, config: Path) -> None:
    before = [launch(config, tmp_path / f"before-{seed}", "--set", f"seed={seed}") for seed in (1, 2)]
    assert [run.wait() for run in before] == [0, 0]
    further = ["--set", "optimizer.max_steps=6", "optimizer.on_schedule_change=adopt", "--resume-from"]
    runs = start(config, tmp_path, [[*further, str(run.folder)] for run in before])
    assert [run.wait() for run in runs] == [78, 78], runs[0].log
    for run in runs:
        assert "process 0 has starting weights " in last_line(run)
        assert "Traceback" not in run.log


def test_a_step_has_the_rows_of_all_drafters_however_they_are_spread(tmp_path: Path, config: Path) -> None:
    spread: list[list[str]] = [["--set", "pipeline.drafters=[cpu,cpu]"], []]
    runs = start(config, tmp_path, spread)
    assert [run.wait() for run in runs] == [0, 0], runs[0].log
    assert checkpoint.read(tmp_path / "0/checkpoints/step-00000004").run()["next_row"] == 4 * 3
    changes = ["optimizer.max_steps=null", "data.epochs=10", "optimizer.on_schedule_change=adopt"]
    resume = ["--set", *changes, "--resume-from", str(tmp_path / "0")]
    resumed = start(config, tmp_path / "resumed", [[*words, *resume] for words in spread])
    assert [run.wait() for run in resumed] == [0, 0], resumed[0].log
    again = start(config, tmp_path / "again", [[*words, *resume[:-1], str(tmp_path / "resumed/0")] for words in spread])
    assert [run.wait() for run in again] == [0, 0], again[0].log
    assert "finished before" in again[0].log


def test_fresh_drafters_of_targets_that_differ_are_refused_by_all(tmp_path: Path, config: Path) -> None:
    runs = start(config, tmp_path, [[], []], prepare=process_1_has_another_target)
    assert [run.wait() for run in runs] == [78, 78], runs[0].log
    for run in runs:
        assert "process 0 has starting weights " in last_line(run)


def process_1_has_another_target() -> None:
    """In a run's process: the folder of process 1 holds another target of the same shape."""
    from trainer.target.model import Target

    original = Target.load

    def load(*words: Any, **options: Any) -> Target:
        target = original(*words, **options)
        target.head.mul_(100.0)
        return target

    if os.environ["RANK"] == "1":
        Target.load = load  # type: ignore[method-assign, assignment]


def test_what_keeps_one_process_from_reading_is_said_by_all(tmp_path: Path, config: Path) -> None:
    runs = start(config, tmp_path, [[], ["--set", "target.path=/nowhere"]])
    assert [run.wait() for run in runs] == [1, 78]
    sentence = "target.path: there is no folder /nowhere"
    assert last_line(runs[1]).endswith(sentence)
    assert f"process 1 on {HOST}: main failed: InputError: {sentence}" in last_line(runs[0])
    assert "Traceback" not in runs[0].log


@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_while_others_read_for_minutes_ends_them_within_seconds(
    tmp_path: Path, config: Path, dies: int
) -> None:
    runs = start(config, tmp_path, [[], []], prepare=reading_for_minutes)
    for run in runs:
        run.until(lambda run=run: (run.folder / "log").exists() and "reads for minutes" in run.log)  # type: ignore[misc]
    runs[dies].kill(signal.SIGKILL)
    killed = time.monotonic()
    assert runs[1 - dies].wait() == 1
    assert time.monotonic() - killed < 10
    assert last_line(runs[1 - dies]).endswith(
        f"run failed: another process failed: PeerError: process {dies} on {HOST} died without a word"
    )


def reading_for_minutes() -> None:
    """In a run's process: its data take long to read."""
    import logging

    import trainer.run.run

    def open_rows(*_: object) -> None:
        logging.getLogger("test").error("reads for minutes")
        time.sleep(600)

    trainer.run.run.open_rows = open_rows  # type: ignore[assignment]


def test_one_process_may_read_for_longer_than_a_collective_waits(tmp_path: Path, config: Path) -> None:
    runs = start(config, tmp_path, [[], []], prepare=process_1_reads_slowly)
    assert [run.wait() for run in runs] == [0, 0], runs[0].log


def process_1_reads_slowly() -> None:
    """In a run's process: 8 s of reading, where everything else may take 6."""
    from datetime import timedelta

    import trainer.run.run
    from trainer.exchange import rendezvous

    rendezvous.TIMEOUT = timedelta(seconds=6)
    original = trainer.run.run.open_rows
    if os.environ["RANK"] == "1":
        trainer.run.run.open_rows = lambda *words: (time.sleep(8), original(*words))[1]  # type: ignore[assignment]


def test_processes_that_know_of_different_numbers_are_refused_by_all(tmp_path: Path, config: Path) -> None:
    runs = start(config, tmp_path, [[], []], sizes=(2, 3))
    assert [run.wait() for run in runs] == [78, 78]
    for run in runs:
        assert "was started with WORLD_SIZE=2, process 1 on" in last_line(run)
        assert "Traceback" not in run.log


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_place_in_the_run_that_cannot_be_is_one_sentence_and_78(tmp_path: Path, config: Path, name: str) -> None:
    run = launch(config, tmp_path / "run", **{"RANK": "0", "WORLD_SIZE": "2", name: "two"})
    assert run.wait() == 78
    assert f"{name} is 'two': it must be a whole number" in last_line(run)
    assert "Traceback" not in run.log
