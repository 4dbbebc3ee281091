"""Looks at the node and its container from the node; runs on the host itself."""

from __future__ import annotations

import glob
import json
import os
import re
import time
from typing import Any, Dict, List, Optional

from dflash_ops.remote import gpu, process
from dflash_ops.remote.protocol import NodeRequest

PCT = "/usr/sbin/pct"
# Keys of a container's configuration that decide whether a GPU job can live there; others may hold private notes,
# and lxc.environment secrets.
_KEYS = re.compile(
    r"(arch|cores|features|hostname|lock|memory|ostype|swap|unprivileged|dev\d+|lxc\.(?!environment)[\w.]+)\Z"
)


def look(request: NodeRequest) -> Dict[str, Any]:
    """request: `container`, its number; `sudo`: go through `sudo -n`. The result is `dflash_ops.verbs.doctor.Node`."""
    vmid, prefix = str(int(request["container"])), ["sudo", "-n"] if request["sudo"] else []
    status = process.call([*prefix, PCT, "status", vmid], 20)
    # Without --current it shows changes that wait for the container's next start as if they held already.
    config = process.call([*prefix, PCT, "config", vmid, "--current"], 20)
    return {
        "user": os.geteuid(),
        "hostname": os.uname().nodename,
        "kernel": os.uname().release,
        "time": time.time(),
        "pct": os.path.exists(PCT),
        "version": _version(),
        "status": status.stdout.strip() if status.status == 0 else None,
        "status_error": status.error or status.stderr.strip()[-300:],
        "config": configuration(config.stdout) if config.status == 0 else None,
        "config_error": config.error or config.stderr.strip()[-300:],
        "other_node": _other_node(vmid),
        "driver": gpu.kernel_driver(),
        "nodes": sorted(glob.glob("/dev/nvidia*")),
        "holders": _holders(),
    }


def _version() -> Optional[str]:
    done = process.call(["pveversion"], 10)
    return done.stdout.strip() or None if done.status == 0 else None


def configuration(text: str) -> Dict[str, str]:
    """What `pct config` printed, without the keys that may hold private notes and secrets."""
    found: Dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(": ")
        if colon and _KEYS.match(key):
            found[key] = found[key] + "; " + value.strip() if key in found else value.strip()
    return found


def _other_node(vmid: str) -> Optional[str]:
    """The cluster node that has the container, when it is not this one."""
    try:
        with open("/etc/pve/.vmlist", encoding="utf-8") as stream:
            node = json.load(stream)["ids"][vmid]["node"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(node) if node != os.uname().nodename.split(".")[0] else None


def _holders() -> List[Dict[str, Any]]:
    """Processes on the GPUs. Only the node can list them: in a container the driver does not know its PIDs."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    found = []
    for line in process.call(query, 10).stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isdigit():
            found.append({"gpu": cells[0], "pid": int(cells[1]), "memory": cells[2], "where": _where(cells[1])})
    return found


def _where(pid: str) -> str:
    """`container 200, dflash-r7.service`, from the process's cgroup."""
    try:
        with open("/proc/%s/cgroup" % pid) as stream:
            text = stream.read()
    except OSError:
        return "unknown"
    container = re.search(r"/lxc(?:\.payload)?[./](\d+)", text)
    unit = re.search(r"/([\w@.-]+\.service)", text)
    parts = ["container " + container.group(1) if container else "the node", unit.group(1) if unit else ""]
    return ", ".join(part for part in parts if part)
