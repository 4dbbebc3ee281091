"""Reads every run's state; asks systemd and the GPUs once for all of them."""

from __future__ import annotations

from typing import Any, Dict

from dflash_ops.remote import files, gpu, status, systemd
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.protocol import RunsAnswer, RunsRequest


def main(request: RunsRequest, channel: Channel) -> RunsAnswer:
    """Events: a snapshot of each run, newest first."""
    names = files.run_names(request["root"])
    chosen = [files.RunPaths(request["root"], name) for name in names[: int(request["count"])]]
    units: Dict[str, Dict[str, Any]] = {}
    failure = "systemctl did not name the unit"
    try:
        shown = systemd.show_units([paths.unit for paths in chosen])
        units = {name: {"kind": "shown", "properties": properties} for name, properties in shown.items()}
    except Refusal as refusal:
        failure = refusal.message
    alive = any(unit["properties"].get("ActiveState") in ("active", "activating") for unit in units.values())
    gpus = gpu.ask(request["root"]) if alive else None
    for paths in chosen:
        unit = units.get(paths.unit, {"kind": "error", "message": failure})
        seen = status.snapshot(paths, {"root": request["root"], "gpu": False, "lines": 100, "steps": 20}, unit)
        seen["gpu"] = gpus
        channel.event(**seen)
    return {"total": len(names)}
