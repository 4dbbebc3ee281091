"""An inventory with one job, its plan, and a session whose container answers from a script."""

from __future__ import annotations

from typing import Any

from dflash_ops.inventory.models import Inventory
from dflash_ops.plan.plan import LaunchOptions, Plan, plan
from dflash_ops.run.record import RootPaths
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.session import Session

CANARY = "s3cr3t-canary-$HOME"
INVENTORY = """\
containers:
  here: {host: local}
environments:
  venv: {python: /opt/venv/bin/python}
jobs:
  smoke:
    config: {optimizer: {lr: 0.001}, pipeline: {targets: [cpu], drafters: [cpu]}}
    source: package
    set: {optimizer.name: muon}
    env: {TOKEN: env:CANARY, PLAIN: "1", FROM_FILE: "file:@folder@/token"}
  eight:
    config: base.yaml
    source: package
    gpus: {target: 0-4, drafters: 5-7}
"""


def planned(inventory: Inventory, *changes: str, job: str = "smoke", run: str | None = "r1") -> Plan:
    return plan(inventory, "here", RootPaths("/var/lib/dflash"), LaunchOptions(job, run, changes))


def snapshot(run: str = "r1", active: str = "active", exit: dict[str, Any] | None = None) -> dict[str, Any]:
    started = {
        "time": 1000.0,
        "unit": f"dflash-{run}.service",
        "invocation_id": "ab12",
        "boot_id": "b",
        "main_pid": 7,
        "systemd_version": "252",
    }
    properties = {"LoadState": "loaded", "ActiveState": active, "SubState": "running", "InvocationID": "ab12"}
    return {
        "run": run,
        "time": 1010.0,
        "monotonic": 50.0,
        "boot_id": "b",
        "age": 10.0,
        "unit": {"kind": "shown", "properties": properties},
        "records": {"spec": None, "started": started, "exit": exit, "kill_requested": None, "unreadable": []},
        "log": {"kind": "file", "size": 10, "inode": 1, "mtime": 1009.0, "lines": ["first", "last \x1b[2J words"]},
        "disk": None,
        "metrics": {"mtime": None, "steps": [], "last": None},
        "checkpoints": [],
        "gpu": None,
        "cpu": None,
    }


PREFLIGHT = {"release": "present", "python": "3.11.2", "environment_missing": False}


def session(inventory: Inventory, **script: list[Any]) -> tuple[Session, FakeTransport]:
    transport = FakeTransport({"preflight": [PREFLIGHT], **script})
    return Session(inventory, "here", transport, quiet=True), transport
