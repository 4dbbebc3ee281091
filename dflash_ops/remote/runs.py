"""Which runs are there and how is each? systemd and the GPUs are asked once for all of them."""

from __future__ import annotations

from typing import Any, Dict

from dflash_ops.remote import files, gpu, status, systemd
from dflash_ops.remote.channel import Channel, Refusal


def main(request: Dict[str, Any], channel: Channel) -> Dict[str, Any]:
    """request: `root`; `count` of the newest runs. Events: a probe's snapshot each, newest first. Result: {total}."""
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
        channel.event(**dict(seen, gpu=gpus))
    return {"total": len(names)}
