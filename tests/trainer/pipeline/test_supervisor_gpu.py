"""The pipeline on GPUs: three modes agree, a warmed cache is hit, NCCL adds up within and across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import launching
from tests.trainer.pipeline import tiny
from tests.trainer.run.test_run import source, target

__all__ = ["source", "target"]

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def on_gpus(targets: list[str], drafters: list[str], **sections: Any) -> Any:
    pipeline = {"targets": targets, "drafters": drafters, "mode": "graph"} | sections.pop("pipeline", {})
    return tiny.run_config(pipeline=pipeline, **sections)


def as_processes(folder: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    """Two processes of a run with a target and a drafter on a GPU each; their losses come to `folder`."""
    program = (
        "import logging, sys, pathlib; from tests.trainer.pipeline import tiny; logging.basicConfig(level='INFO'); "
    )
    program += f"gpu = ['cuda:' + sys.argv[2]]; tiny.losses_of_this_process(1, {steps}, pathlib.Path(sys.argv[1]), "
    program += "targets=gpu, drafters=gpu, mode='graph')"
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder / f"losses-{rank['RANK']}"), rank["RANK"]],
            cwd=ROOT,
            env=os.environ | rank,
            stderr=(folder / f"log-{rank['RANK']}").open("wb"),
        )
        for rank in launching.ranks()
    ]


def test_graphs_compiled_code_and_eager_code_learn_the_same() -> None:
    made = {}
    for mode in ("graph", "compiled", "eager"):
        torch.compiler.reset()
        # One target for all: its layers too are compiled in graph mode, which rounds elsewhere.
        config = on_gpus(["cuda:0"], ["cuda:0"], pipeline={"mode": mode}, target={"compile": False})
        recorder, outcome = tiny.train(config)
        assert outcome.step == 6
        made[mode] = recorder
    assert made["graph"].losses == pytest.approx(made["compiled"].losses, rel=1e-4)
    assert made["graph"].losses == pytest.approx(made["eager"].losses, rel=0.02)
    drafter = next(report for report in made["graph"].compiled if report["worker"] == "drafter 0")
    assert (drafter["graph_breaks"], drafter["recompiles"]) == (0, 0)
    assert drafter["captured"] == ["forward", "chunk", "measure", "backward", "update"]


def test_a_run_starts_from_a_warmed_cache_with_hits_alone(tmp_path: Path) -> None:
    from trainer.commands.warmup import warm_up

    torch.compiler.reset()
    config = on_gpus(["cuda:0"], ["cuda:0"], pipeline={"compile_cache": tmp_path})
    warmed = warm_up(
        config, tiny.drafter_config(), tiny.row_source(config).shape, ["cuda:0"], load_target=tiny.load_target
    )
    assert all(report.cache_misses > 0 for report in warmed)
    torch.compiler.reset()
    recorder, _ = tiny.train(config)
    assert {report["worker"] for report in recorder.compiled} == {"target 0", "drafter 0"}
    for report in recorder.compiled:
        assert report["compiled"], report
        assert report["cache_misses"] == 0, report
        assert report["cache_hits"] > 0, report


@two_gpus
def test_features_cross_from_one_gpu_to_the_other_and_two_ranks_live_in_one_process() -> None:
    torch.compiler.reset()
    alone, _ = tiny.train(on_gpus(["cuda:0"], ["cuda:0"], optimizer={"gradient_accumulation_steps": 2}))
    torch.compiler.reset()
    two, _ = tiny.train(on_gpus(["cuda:0"], ["cuda:0", "cuda:1"]))
    assert two.losses == pytest.approx(alone.losses, rel=1e-2)
    assert [step.tokens for step in two.steps] == [step.tokens for step in alone.steps]


@two_gpus
def test_two_processes_over_nccl_give_the_losses_of_one_process(tmp_path: Path) -> None:
    processes = as_processes(tmp_path, 6)
    assert [process.wait(300) for process in processes] == [0, 0], (tmp_path / "log-0").read_text()
    torch.compiler.reset()
    # A target on each GPU, as the processes have: each row's features are then made by the very same kernels.
    one, _ = tiny.train(on_gpus(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]))
    expected = [loss.hex() for loss in one.losses]
    for rank in range(2):
        assert (tmp_path / f"losses-{rank}").read_text().split() == expected


@two_gpus
@pytest.mark.parametrize("victim", [0, 1])
def test_the_sudden_end_of_a_process_ends_the_other_though_it_waits_in_nccl(
    tmp_path: Path, target: Path, source: Path, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "PATIENCE", 150.0)
    config = launching.write_config(
        tmp_path / "run.yaml",
        target,
        source,
        target={"dtype": "bfloat16"},
        drafter={"head_dim": 16},
        data={"epochs": 1_000_000},
        optimizer={"max_steps": 1_000_000},
        pipeline={"targets": ["cuda"], "drafters": ["cuda"], "mode": "graph"},
    )
    runs = [launching.launch(config, tmp_path / rank["RANK"], **rank) for rank in launching.ranks()]
    try:
        runs[0].until(lambda: len(runs[0].steps) > 20)
        runs[victim].kill(signal.SIGKILL)
        other = runs[1 - victim]
        start = time.monotonic()
        assert other.wait() == 1, other.log
        assert time.monotonic() - start < 30
        assert f"process {victim} on" in other.log
    finally:
        for run in runs:
            run.process.kill()
