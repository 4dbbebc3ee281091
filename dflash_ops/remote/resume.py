"""What does one need to know of a run to go on from its newest checkpoint?"""

from __future__ import annotations

from typing import Any, Dict

from dflash_ops.remote import facts, files, status, systemd
from dflash_ops.remote.channel import CONFIGURATION, TEMPORARY, Channel, Refusal


def main(request: Dict[str, Any], channel: Channel) -> Dict[str, Any]:
    """request: `root`, `run`. Raises Refusal.

    Result: `spec`; `checkpoint` and its `step`; `total` steps of the run (null when it did not say); the facts `then`
    (or null) and `now`.
    """
    paths = files.find_run(request["root"], request["run"])
    spec = files.read_json(paths.spec)
    if spec is None:
        raise Refusal(CONFIGURATION, "the run %s has no readable spec.json" % paths.run, "launch anew")
    unit = systemd.show_units([paths.unit]).get(paths.unit, {})
    if unit.get("LoadState") != "not-found" and unit.get("ActiveState") not in ("inactive", "failed"):
        hint = "`dflash kill %s` first: it saves before it leaves" % paths.run
        raise Refusal(TEMPORARY, "the run %s has not ended" % paths.run, hint, "live")
    checkpoints = status.checkpoints_of(paths.checkpoints)
    if not checkpoints:
        raise Refusal(CONFIGURATION, "the run %s left no checkpoint" % paths.run, "launch anew", "no-checkpoint")
    wanted = {"root": request["root"], "python": str(spec.get("python")), "variables": spec.get("variables")}
    return {
        "spec": spec,
        "checkpoint": checkpoints[-1]["name"],
        "step": checkpoints[-1]["step"],
        "total": (status.metrics_of(paths.metrics, 50)["last"] or {}).get("total_steps"),
        "then": files.read_json(paths.facts),
        "now": facts.collect(wanted),
    }
