"""Plays the user: a folder, an inventory for the lab, and `dflash` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.lab.lab import REPOSITORY, STOPPED_VMID, VMID, Lab, wait_for
from tests.lab.network import FarAway

PYTHON = REPOSITORY / ".venv/bin/python"
STAND_IN = Path(__file__).parent / "stand_in"


@dataclass
class Dflash:
    """The command line of a user: an inventory for the lab, and `dflash` as a process of its own."""

    lab: Lab
    folder: Path
    root: str
    inventory: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    enter: list[str] = field(default_factory=list)  # put before every command
    said: tuple[str, str] = ("", "")

    def save(self) -> Path:
        path = self.folder / "inventory.yaml"
        path.write_text(yaml.safe_dump(self.inventory, sort_keys=False))
        return path

    def job(self, name: str = "job", **fields: Any) -> None:
        """A job of the stand-in trainer; `config` holds what it shall do."""
        entry: dict[str, Any] = {"source": str(STAND_IN), "timeout": 30, **fields}
        entry["config"] = {
            "pipeline": {"targets": ["cpu"], "drafters": ["cpu"]},
            **fields.get("config", {"steps": None}),
        }
        self.inventory["jobs"][name] = entry

    def argv(self, *words: str) -> list[str]:
        return [*self.enter, str(PYTHON), "-m", "dflash_ops.main", "--inventory", str(self.save()), *words]

    def env(self) -> dict[str, str]:
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state"), "XDG_RUNTIME_DIR": ""}
        return {**os.environ, **home, **self.environment}

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """`dflash WORDS` in the background."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(self.argv(*words), env=self.env(), cwd=self.folder, text=True, **pipes)

    def __call__(self, *words: str, code: int | None = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """`dflash WORDS` to its end, which must be `code`."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"dflash {' '.join(words)} did not end within {timeout} s:\n{out}\n{err}") from None
        if code is not None:
            assert process.returncode == code, f"dflash {' '.join(words)} exited {process.returncode}:\n{out}\n{err}"
        assert not any(line.startswith("Traceback") for line in err.splitlines()), err
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def json(self, *words: str, code: int | None = 0) -> dict[str, Any]:
        """The document of `dflash WORDS --json`."""
        answer: dict[str, Any] = json.loads(self(*words, "--json", code=code).stdout)
        return answer

    def exec(self, run: str, *argv: str) -> bytes:
        """What a command in the container printed, byte for byte."""
        done = subprocess.run(self.argv("exec", run, "--", *argv), env=self.env(), capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    def launch(self, run: str, *words: str, **config: Any) -> None:
        """Start a run of the stand-in trainer."""
        self.job(config={"steps": None, **config})
        self("launch", "job", "--run", run, *words)

    def far_away(self, laptop: FarAway) -> None:
        """Reach the node over the cable that can be unplugged."""
        self.enter = laptop.enter
        self.inventory["hosts"]["node"] |= {"address": laptop.address, "port": laptop.port}

    def state(self, run: str) -> str:
        return str(self.json("status", run)["state"])

    def wait_state(self, run: str, *states: str) -> dict[str, Any]:
        """The status of a run once it is in one of these states."""

        def look() -> dict[str, Any] | None:
            status = self.json("status", run)
            return status if status["state"] in states else None

        return wait_for(f"{run} is {' or '.join(states)}", look, 60)

    def run_file(self, run: str, name: str) -> str:
        return self.lab.container("cat", f"{self.root}/runs/{run}/{name}").stdout

    def runs(self) -> list[str]:
        """Names of the run directories in the container."""
        return self.lab.container("sh", "-c", f"ls {self.root}/runs 2>/dev/null || true").stdout.split()


def make_user(lab: Lab, folder: Path) -> Dflash:
    """A user whose runs lie in a root folder of the container that nobody else uses."""
    root = f"/var/lib/dflash-{uuid.uuid4().hex[:8]}"
    return Dflash(lab, folder, root, inventory_for(lab, root))


CLEAN = """
for run in $(ls "$1/runs" 2>/dev/null); do
    systemctl kill -s KILL "dflash-$run"; systemctl stop "dflash-$run"; systemctl reset-failed "dflash-$run"
done 2>/dev/null
umount --lazy "$1" 2>/dev/null
rm -rf "$1"
"""


def clean(lab: Lab, root: str) -> None:
    """Whatever a test did, the next one finds sshd, a booted container, no unit and no files of runs."""
    lab.recover()
    lab.container("sh", "-c", CLEAN, "-", root)


def inventory_for(lab: Lab, root: str) -> dict[str, Any]:
    """An inventory whose default container is the lab's container."""
    return {
        "default_container": "ct200",
        "hosts": {
            "node": {
                "address": "127.0.0.1",
                "port": lab.port,
                "user": "root",
                "identity": str(lab.key),
                "known_hosts": str(lab.known_hosts),
                "ssh_config": "/dev/null",
            }
        },
        "containers": {
            "ct200": {"host": "node", "container": VMID, "root": root},
            "ct201": {"host": "node", "container": STOPPED_VMID, "root": root},
            "ct999": {"host": "node", "container": 999, "root": root},
        },
        "environments": {"venv": {"python": str(PYTHON)}},
        "jobs": {},
    }
