"""Snapshots for the tests of what is made of them: a running CPU run, changed where a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_ops.inventory.models import Inventory
from dflash_ops.run.probes.gpu import Device, GpuDevices, GpuNone
from dflash_ops.run.probes.log import LogFresh, LogSilent
from dflash_ops.run.probes.snapshot import Cpu, Progress, Snapshot, Step
from dflash_ops.run.probes.unit import UnitRunning
from dflash_ops.run.record import ExitRecord, GpuRoles, KillRequest, RunRecord, RunSpec, Started

INVENTORY = Inventory(path=Path("/nowhere/inventory.yaml"), containers={})
NOW = 1_800_000_000.0
INVOCATION = "0123456789abcdef0123456789abcdef"
BOOT = "5f1e8f0e-0000-0000-0000-000000000001"
EIGHT = GpuRoles(target=[0, 1, 2, 3, 4], drafters=[5, 6, 7])


def spec(**changes: Any) -> RunSpec:
    given: dict[str, Any] = {
        "schema": 1,
        "run": "r7",
        "job": "smoke",
        "container": "lab",
        "created": NOW - 610,
        "launched_by": "ann@laptop",
        "release": "a" * 32,
        "environment": "venv",
        "python": "/opt/venv/bin/python",
        "config": {"pipeline": {"targets": ["cpu"], "drafters": ["cpu"]}},
        "gpus": {"target": [], "drafters": []},
    }
    return RunSpec.model_validate({**given, **changes})


def started(**changes: Any) -> Started:
    given: dict[str, Any] = {
        "time": NOW - 600,
        "unit": "dflash-r7.service",
        "invocation_id": INVOCATION,
        "boot_id": BOOT,
        "main_pid": 292,
        "systemd_version": "252",
    }
    return Started.model_validate({**given, **changes})


def exit_record(result: str, code: str | None, status: str | None, **changes: Any) -> ExitRecord:
    given: dict[str, Any] = {
        "time": NOW - 10,
        "result": result,
        "exit_code": code,
        "exit_status": status,
        "invocation_id": INVOCATION,
        "boot_id": BOOT,
    }
    return ExitRecord.model_validate({**given, **changes})


KILL = KillRequest(time=NOW - 20, by="ann@laptop", grace=45)


def running(**changes: Any) -> UnitRunning:
    given: dict[str, Any] = {
        "sub_state": "running",
        "invocation_id": INVOCATION,
        "main_pid": 292,
        "seconds": 600.0,
        "status_text": "step 12/200 loss 3.21",
    }
    return UnitRunning.model_validate({**given, **changes})


def fresh(age: float = 2.0, lines: tuple[str, ...] = (), size: int = 900) -> LogFresh:
    return LogFresh(size=size, inode=7, age=age, lines=lines)


def silent(age: float = 2460.0, lines: tuple[str, ...] = ()) -> LogSilent:
    return LogSilent(size=900, inode=7, age=age, lines=lines)


def progress(age: float = 2.0, step: int = 12, total: int | None = 200) -> Progress:
    return Progress(last=Step(step=step, total_steps=total, loss=3.21), age=age)


def gpus(*uses: tuple[int | None, float | None], memory: int = 90000) -> GpuDevices:
    """One GPU of 700 W for each (utilisation, power)."""
    return GpuDevices(
        devices=tuple(
            Device(index=i, name="NVIDIA H200", utilization=use, power=power, power_limit=700.0, memory_used=memory)
            for i, (use, power) in enumerate(uses)
        )
    )


def record(**parts: Any) -> RunRecord:
    return RunRecord.model_validate({"run": "r7", "spec": spec(), "started": started(), **parts})


def snapshot(**changes: Any) -> Snapshot:
    """Of a healthy run on CPU, ten minutes old."""
    given: dict[str, Any] = {
        "record": record(),
        "time": NOW,
        "boot_id": BOOT,
        "age": 610.0,
        "unit": running(),
        "log": fresh(),
        "gpu": GpuNone(),
        "progress": progress(),
        "quiet_after": 120.0,
        "cpu": Cpu(used=1.9, over=1.0),
    }
    return Snapshot(**{**given, **changes})
