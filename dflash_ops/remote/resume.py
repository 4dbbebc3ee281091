"""Reads what is needed to go on from a run's newest checkpoint."""

from __future__ import annotations

from dflash_ops.remote import facts, files, status, systemd, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.protocol import CONFIGURATION, TEMPORARY, FactsRequest, OneRun, ResumeAnswer


def main(request: OneRun, channel: Channel) -> ResumeAnswer:
    """The spec, the newest checkpoint and the facts of an ended run. Raises Refusal."""
    paths = which.find_run(request["root"], request["run"])
    spec = files.read_json(paths.spec)
    if spec is None:
        raise Refusal(CONFIGURATION, "the run %s has no readable spec.json" % paths.run, "launch anew")
    if not systemd.is_over(systemd.unit_of(paths.unit)):
        hint = "`dflash kill %s` first: it saves before it leaves" % paths.run
        raise Refusal(TEMPORARY, "the run %s has not ended" % paths.run, hint, "live")
    checkpoints = status.checkpoints_of(paths.checkpoints)
    if not checkpoints:
        raise Refusal(CONFIGURATION, "the run %s left no checkpoint" % paths.run, "launch anew", "no-checkpoint")
    wanted: FactsRequest = {
        "root": request["root"],
        "python": str(spec.get("python")),
        "variables": spec.get("variables"),
    }
    return {
        "spec": spec,
        "checkpoint": checkpoints[-1]["name"],
        "step": checkpoints[-1]["step"],
        "total": (status.metrics_of(paths.metrics, 50)["last"] or {}).get("total_steps"),
        "then": files.read_json(paths.facts),
        "now": facts.collect(wanted),
    }
