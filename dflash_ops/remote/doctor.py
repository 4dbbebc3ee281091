"""Collects what `dflash doctor` judges: the container's facts, or on the host itself the node's view of it."""

from __future__ import annotations

import errno
import glob
import os
from typing import Any, Dict, Optional, Union, cast

from dflash_ops.remote import files, process, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.protocol import FactsRequest, NodeRequest


def main(request: Union[FactsRequest, NodeRequest], channel: Channel) -> Dict[str, Any]:
    """request: `do`: facts (see `facts.collect`) or node (see `node.look`), and what that one takes."""
    if request["do"] == "node":
        from dflash_ops.remote import node

        return node.look(cast(NodeRequest, request))
    from dflash_ops.remote import facts

    asked = cast(FactsRequest, request)
    return dict(facts.collect(asked), trial=_trial(asked["root"]))


def _trial(root: str) -> Dict[str, Any]:
    """What a launch needs, tried: see `dflash_ops.verbs.doctor_lines.Trial`."""
    try:
        elsewhere = [{"run": one.run, "directory": one.directory} for one in which.elsewhere(root)]
    except Refusal:
        elsewhere = []  # the unit's line says that systemd does not answer
    return {"unit": _unit(), "refused": _refused(), "noexec": _noexec(root), "elsewhere": elsewhere}


def _unit() -> Optional[str]:
    """Why a transient unit that notifies systemd fails; None when it works. It leaves nothing behind."""
    name = "dflash_doctor_%d.service" % os.getpid()  # no run's name, and no `dflash-*` unit
    command = ["systemd-run", "--quiet", "--wait", "--collect", "--unit=" + name, "-p", "TimeoutStartSec=10"]
    command += ["-p", "Type=notify", "-p", "NotifyAccess=all", "/bin/sh", "-c", "systemd-notify --ready"]
    done = process.call(command, 20)
    if done.status == 0:
        return None
    return (done.stderr.strip().splitlines() or [done.error or "it ended with status %s" % done.status])[-1]


def _refused() -> Dict[str, str]:
    """GPU device files that cannot be opened, with the name of the error."""
    found = {}
    for path in sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/nvidiactl") + glob.glob("/dev/nvidia-uvm")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            found[path] = errno.errorcode.get(error.errno or 0, str(error.errno))
    return found


def _noexec(root: str) -> bool:
    """Whether the file system of the root folder, or of what stands of its path, runs no programs."""
    path = files.checked_root(root)
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
