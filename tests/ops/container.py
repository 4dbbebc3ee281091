"""Run directories in a folder of this machine, with systemd's answers given by the test."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_ops.remote import systemd, which
from dflash_ops.verbs.session import Session
from tests.ops.evidence import BOOT, INVENTORY, INVOCATION
from tests.ops.inprocess import InProcess

ABSENT = {"LoadState": "not-found", "ActiveState": "inactive", "Result": "success"}


WELL = {
    "time": 1.0,
    "result": "success",
    "exit_code": "exited",
    "exit_status": "0",
    "invocation_id": INVOCATION,
    "boot_id": BOOT,
}


def alive(pid: int = 1, **changes: str) -> dict[str, str]:
    given = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "InvocationID": INVOCATION}
    return {**given, "MainPID": str(pid), "StatusText": "step 3/20 loss 3.21", **changes}


class Container:
    """A root folder with runs, and what systemd says of each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units: dict[str, dict[str, str]] = {}

    def run(self, name: str, unit: dict[str, str], *, steps: int = 3, **records: dict[str, Any]) -> Path:
        folder = self.root / "runs" / name
        folder.mkdir(parents=True)
        (folder / "log").write_text(f"hello from {name}\n")
        spec = {
            "schema": 1,
            "run": name,
            "job": "smoke",
            "container": "lab",
            "created": time.time() - 60,
            "launched_by": "ann@laptop",
            "release": "a" * 32,
            "environment": "venv",
            "python": "/opt/venv/bin/python",
            "config": {},
            "gpus": {"target": [], "drafters": []},
        }
        started = {
            "time": time.time() - 59,
            "unit": f"dflash-{name}.service",
            "invocation_id": INVOCATION,
            "boot_id": BOOT,
            "main_pid": 1,
            "systemd_version": "252",
        }
        for kind, value in {"spec": spec, "started": started, **records}.items():
            (folder / f"{kind.replace('_', '-')}.json").write_text(json.dumps(value))
        self.write_steps(folder, steps)
        self.units[f"dflash-{name}.service"] = unit
        return folder

    def write_steps(self, folder: Path, steps: int) -> None:
        lines = [
            json.dumps({"kind": "step", "step": i + 1, "total_steps": 20, "time": time.time(), "loss": 4.0 - i / 10})
            for i in range(steps)
        ]
        if lines:
            (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def live_runs(self) -> list[which.LiveRun]:
        """What `which.live_runs` finds: the units that are not over, with the GPUs of their specs."""
        found = []
        for unit, properties in self.units.items():
            if not systemd.is_over(properties):
                run = unit.removeprefix("dflash-").removesuffix(".service")
                folder = properties.get("directory", str(self.root / "runs" / run))
                described = {"Description": properties.get("Description", "")}
                pid = int(properties.get("MainPID", "0"))
                found.append(which.LiveRun(run, unit, folder, which._gpus(described, folder), pid))
        return found

    def session(self, **options: Any) -> Session:
        return Session(INVENTORY, "lab", InProcess(self.root, **options), str(self.root), quiet=True)


def ended(result: str, code: str, status: str) -> dict[str, Any]:
    return {
        "time": time.time(),
        "result": result,
        "exit_code": code,
        "exit_status": status,
        "invocation_id": INVOCATION,
        "boot_id": BOOT,
    }


def shown(view: object) -> str:
    screen = Console(file=io.StringIO(), width=200, markup=False, highlight=False)
    screen.print(view)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


HOSTILE = "\x1b]0;title\x07\x1b[2J"
