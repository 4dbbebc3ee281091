"""Asks systemd about units."""

from __future__ import annotations

from typing import Dict, Mapping, Sequence

from dflash_ops.remote.channel import Refusal
from dflash_ops.remote.process import call
from dflash_ops.remote.protocol import TEMPORARY

SHOW_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,ExecMainStartTimestampMonotonic,"
    "ExecMainExitTimestampMonotonic,MainPID,InvocationID,NRestarts,StatusText,WatchdogTimestampMonotonic,"
    "MemoryCurrent,MemoryPeak,TasksCurrent,ControlGroup,NeedDaemonReload,ActiveEnterTimestampMonotonic"
)


def show_units(
    units: Sequence[str], timeout: float = 10, properties: str = SHOW_PROPERTIES
) -> Dict[str, Dict[str, str]]:
    """`systemctl show` of each unit, one call. Raises Refusal(reason="systemd") when systemd does not answer.

    `systemctl show` exits 0 for unknown units; LoadState=not-found must be read before Result.
    """
    if not units:
        return {}
    done = call(["systemctl", "show", "--property=" + properties, "--"] + list(units), timeout)
    if done.status != 0:
        why = done.error or done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        why = why if isinstance(why, str) else why[0]
        raise Refusal(TEMPORARY, "systemd in the container did not answer: %s" % why, reason="systemd")
    found: Dict[str, Dict[str, str]] = {}
    for block in done.stdout.split("\n\n"):
        shown = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in shown:
            found[shown["Id"]] = shown
    return found


def unit_of(name: str) -> Dict[str, str]:
    """systemd's properties of a unit; empty when systemctl does not name it. Raises Refusal as `show_units`."""
    return show_units([name]).get(name, {})


def is_over(unit: Mapping[str, str]) -> bool:
    """Whether a unit runs no more, or never did. One that systemd does not name may run: unknown is not dead."""
    return unit.get("LoadState") == "not-found" or unit.get("ActiveState") in ("inactive", "failed")


def boot_id() -> str:
    """Changes when the container restarts (LXC mounts a fresh one for each start)."""
    with open("/proc/sys/kernel/random/boot_id") as stream:
        return stream.read().strip()
