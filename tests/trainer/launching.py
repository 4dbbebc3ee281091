"""Runs of the real command line that start in a second: forked from a server that has imported everything once."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer.run.run", "trainer.__main__", "tests.trainer.launching"])
PATIENCE = 90.0  # seconds after which a test gives up waiting; nothing is measured by it


def _child(
    arguments: list[str], log: Path, environment: dict[str, str], prepare: Callable[[], None] | None = None
) -> None:
    import torch

    from trainer.__main__ import main

    torch.set_num_threads(1)
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    if prepare is not None:
        prepare()
    sys.exit(main(arguments))


def ranks(count: int = 2) -> list[dict[str, str]]:
    """torchrun's variables for each process of a run on this machine, which meet at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    group["GLOO_SOCKET_IFNAME"] = "lo"
    return [group | {"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)]


@dataclass
class Run:
    """A trainer process and its run directory."""

    process: ForkServerProcess
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl; the last may be torn by a kill."""
        path = self.folder / "metrics.jsonl"
        texts = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(text) for text in texts if text.endswith("}\n") and text.startswith("{")]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == "step"]

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))

    def kill(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """The exit code; negative: the signal that ended it."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"still running:\n{self.log}"
        return self.process.exitcode

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the process lives."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.is_alive(), f"it ended with {self.process.exitcode}:\n{self.log}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.log}"
            time.sleep(0.005)


def launch(
    config: Path, folder: Path, *arguments: str, prepare: Callable[[], None] | None = None, **environment: str
) -> Run:
    """Start `python -m trainer run CONFIG --run-dir FOLDER ARGUMENTS`, its output in FOLDER/log.

    Args: prepare: called first in the new process; it must be importable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = ["run", str(config), "--run-dir", str(folder), *arguments]
    process = CONTEXT.Process(target=_child, args=(words, folder / "log", environment, prepare))
    process.start()
    return Run(process, folder)


def command(log: Path, *words: str, **environment: str) -> tuple[int, str]:
    """Run `python -m trainer WORDS` to its end: the exit code, and all that it said."""
    log.unlink(missing_ok=True)
    process = CONTEXT.Process(target=_child, args=(list(words), log, environment, None))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode is not None, f"still running:\n{log.read_text()}"
    return process.exitcode, log.read_text()


def write_config(path: Path, target: Path, source: Path, /, **sections: dict[str, Any]) -> Path:
    """A run of a two-layer drafter on a tiny target, 40 steps of milliseconds, every one in metrics.jsonl."""
    document: dict[str, dict[str, Any]] = {
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"num_layers": 2, "block_size": 4, "target_layer_ids": [1, 3]},
        "data": {"sources": [str(source)], "sequence_length": 64, "anchors_per_row": 8, "epochs": 1000},
        "optimizer": {"lr": 3e-3, "max_steps": 40},
        "pipeline": {"targets": ["cpu"], "drafters": ["cpu"], "mode": "eager"},
        "telemetry": {"every": 1, "tensorboard": False},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    path.write_text(yaml.safe_dump(document))
    return path


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
