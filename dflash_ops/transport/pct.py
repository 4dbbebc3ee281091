"""Enters a container from its node by `pct exec` or `lxc-attach`, and explains their failures.

Their exit codes are ambiguous (2, 126, 127 and 255 may be the command's own, and ssh's), so only their words count,
and no line numbers in them: these change with every version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from dflash_ops.errors import DflashError
from dflash_ops.inventory.models import ContainerEntry
from dflash_ops.transport.base import Misconfigured, NotPermitted, Unanswered, Unreachable
from dflash_ops.transport.program import BOOTSTRAP

PCT = "/usr/sbin/pct"  # a non-root user's PATH lacks sbin
LXC_ATTACH = "/usr/bin/lxc-attach"


def enter_command(entry: ContainerEntry, *, sudo: bool) -> str:
    """The command line for the host's login shell. Constant but for the container's number."""
    vmid = entry.container
    assert isinstance(vmid, int)
    if entry.enter == "pct":
        inner = f"{PCT} exec {vmid} --keep-env 0 -- {BOOTSTRAP}"
    else:
        inner = f"{LXC_ATTACH} -n {vmid} --clear-env -- {BOOTSTRAP}"
    return f"sudo -n {inner}" if sudo else inner


def sudoers_line(entry: ContainerEntry, user: str = "USER") -> str:
    """The one line that lets `user` enter this container and do nothing else as root on the node."""
    if entry.enter == "pct":
        return f"{user} ALL=(root) NOPASSWD: {PCT} exec {entry.container} --keep-env 0 -- /bin/sh -c *"
    return f"{user} ALL=(root) NOPASSWD: {LXC_ATTACH} -n {entry.container} --clear-env -- /bin/sh -c *"


LOCKS = {
    "backup": ("a backup runs", "it ends by itself; one that was aborted leaves the lock: `pct unlock {vmid}`"),
    "create": ("it is being created or restored", "wait for that task; if it failed, remove and create it again"),
    "destroyed": ("it is being destroyed", "there is nothing to enter any more"),
    "disk": ("a volume is being moved or resized", "wait for that task"),
    "fstrim": ("its file systems are being trimmed", "wait for that task"),
    "migrate": ("it is being moved to another node", "wait for that task, then point the host at the new node"),
    "mounted": ("`pct mount` holds it", "`pct unmount {vmid}` on the node"),
    "rollback": ("a snapshot is being rolled back", "wait for that task"),
    "snapshot": ("a snapshot is being made", "wait for that task"),
    "snapshot-delete": ("a snapshot is being deleted", "wait for that task"),
}
"""What Proxmox VE locks a container for, and what to do about each lock"""


def lock_cure(lock: str, vmid: object) -> tuple[str, str]:
    """What a lock means, and its cure; for an unknown one in general words."""
    why, cure = LOCKS.get(
        lock, ("a task of Proxmox VE holds it", "wait for that task; `pct unlock {vmid}` if none runs")
    )
    return why, cure.format(vmid=vmid)


def explain(
    text: str, status: int | None, entry: ContainerEntry, host: str, *, root: bool = True
) -> DflashError | None:
    """The error that `text` (stderr and stray stdout) means, or None when it says nothing known.

    Args:
        root: whether the command ran as root; lxc-attach tells other users that a running container has no init.
    """
    has = partial(_says, text)
    for known in (_state_error, _sudo_error, _rights_error, _tool_error):
        if (error := known(text, has, entry, host, root)) is not None:
            return error
    return None


def _says(text: str, *patterns: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _state_error(
    text: str, has: Callable[..., bool], entry: ContainerEntry, host: str, root: bool
) -> DflashError | None:
    """The container's or the node's own state."""
    vmid = entry.container
    if has(r"ipcc_send_rec\S* failed: Connection refused", r"access control list: Connection refused"):
        return Unanswered(
            f"the cluster file system of {host} is not up: the node boots, or pve-cluster failed",
            f"try again; if it stays so, `systemctl status pve-cluster` on {host}",
        )
    if has(r"container '\d+' not running"):
        return Unreachable(f"container {vmid} on {host} is stopped", f"start it: `pct start {vmid}` on {host}")
    if has(r"Failed to get init pid"):  # lxc-attach says the same of a container that is not there
        if not root:
            return NotPermitted(
                f"lxc-attach on {host} needs root: it shows container {vmid} to no other user",
                f"log in as root, or set `sudo: true` and add to sudoers: `{sudoers_line(entry)}`",
            )
        return Unreachable(
            f"container {vmid} on {host} is stopped, or there is none", f"look with `pct status {vmid}` on {host}"
        )
    if has(r"Configuration file 'nodes/[^']+' does not exist"):
        node = re.search(r"nodes/([^/']+)/", text)
        return Misconfigured(
            f"there is no container {vmid} on {host} (node {node[1] if node else '?'})",
            f"it may be on another node: `pvesh get /cluster/resources --type vm` on {host} lists them all",
        )
    if has(r"(CT|VM) is locked", r"can't lock file", r"is locked \("):
        named = re.search(r"is locked \(([\w-]+)\)", text)
        why, cure = lock_cure(named[1] if named else "", vmid)
        return Unanswered(f"container {vmid} on {host} is locked: {why}", cure if named else "try again when it ends")
    return None


def _sudo_error(
    text: str, has: Callable[..., bool], entry: ContainerEntry, host: str, root: bool
) -> DflashError | None:
    """sudo's refusals."""
    if has(r"sudo: .*password is required", r"sudo: .*terminal is required", r"sudo: no tty present"):
        return NotPermitted(
            f"sudo on {host} asks for a password",
            f"add to /etc/sudoers.d/dflash there: `{sudoers_line(entry)}`",
        )
    if has(r"not allowed to (execute|run sudo)", r"is not in the sudoers file"):
        return NotPermitted(
            f"sudo on {host} does not allow this user to enter container {entry.container}",
            f"add to /etc/sudoers.d/dflash there: `{sudoers_line(entry)}`",
        )
    if has(
        r"sudo: (command )?not found", r"sudo: No such file", r"Unknown command:? '?sudo", r"command not found: sudo"
    ):
        return Misconfigured(f"there is no sudo on {host}", "install it, or set `sudo: false` and log in as root")
    return None


def _rights_error(
    text: str, has: Callable[..., bool], entry: ContainerEntry, host: str, root: bool
) -> DflashError | None:
    """The tool is missing, or needs root."""
    tool, path = _tool(entry)
    escaped = re.escape(path)
    if has(
        rf"{escaped}: (command )?not found",
        rf"{escaped}'?: No such file",
        rf"no such file or directory: {escaped}",
        rf"command not found: {escaped}",
        rf"Unknown command:? '?{escaped}",
    ):
        return Misconfigured(f"there is no {path} on {host}", "is this host a Proxmox VE node, and the right one?")
    if has(
        r"ipcc_send_rec",
        r"Unable to load access control list",
        r"please run as root",
        r"you are not root",
        r"You lack access to",
    ):
        return NotPermitted(
            f"{tool} on {host} needs root",
            f"log in as root (`user: root`), or set `sudo: true` and add to sudoers: `{sudoers_line(entry)}`",
        )
    if has(rf"{escaped}: Permission denied", rf"permission denied: {escaped}"):
        return NotPermitted(f"this user may not run {path} on {host}", "log in as root, or set `sudo: true`")
    return None


def _tool_error(
    text: str, has: Callable[..., bool], entry: ContainerEntry, host: str, root: bool
) -> DflashError | None:
    """The tool ran, and could not do it."""
    tool, _ = _tool(entry)
    if has(r"Failed to exec \"/bin/sh\"", r"exec: \"/bin/sh\""):
        return Misconfigured(f"there is no /bin/sh in container {entry.container}", "is it a Linux system container?")
    if has(r"parameter verification failed", r"unable to parse option", r"Unknown option"):
        return Misconfigured(
            f"{tool} on {host} did not take its options", "Proxmox VE 8.2 or newer is needed", detail=text
        )
    if (line := re.search(r"lxc-attach: .*", text)) is not None:
        said = re.sub(r"^.*: \d+ ", "", line[0])
        if has(r"Permission denied", r"Operation not permitted"):
            return NotPermitted(f"lxc-attach on {host} needs root: {said}", "log in as root, or set `sudo: true`")
        return Unreachable(
            f"lxc-attach on {host} could not enter container {entry.container}: {said}", "is it running?"
        )
    return None


def _tool(entry: ContainerEntry) -> tuple[str, str]:
    return ("pct", PCT) if entry.enter == "pct" else ("lxc-attach", LXC_ATTACH)
