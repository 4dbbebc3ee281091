"""How is a container entered from its node? By `pct exec` or `lxc-attach`; what they say when they fail is explained.

Their exit codes are ambiguous (2, 126, 127 and 255 may be the command's own, and ssh's), so only their words count,
and no line numbers in them: these change with every version.
"""

from __future__ import annotations

import re

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


def explain(text: str, status: int | None, entry: ContainerEntry, host: str) -> DflashError | None:
    """The error that `text` (stderr and stray stdout) means, or None when it says nothing known."""
    vmid = entry.container
    tool = "pct" if entry.enter == "pct" else "lxc-attach"
    path = PCT if entry.enter == "pct" else LXC_ATTACH

    def has(*patterns: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)

    if has(r"container '\d+' not running"):
        return Unreachable(f"container {vmid} on {host} is stopped", f"start it: `pct start {vmid}` on {host}")
    if has(r"Failed to get init pid"):  # lxc-attach says the same of a container that is not there
        return Unreachable(
            f"container {vmid} on {host} is stopped, or there is none", f"look with `pct status {vmid}` on {host}"
        )
    if has(r"Configuration file 'nodes/[^']+' does not exist"):
        node = re.search(r"nodes/([^/']+)/", text)
        return Misconfigured(
            f"there is no container {vmid} on {host} (node {node[1] if node else '?'})",
            f"it may be on another node: `pvesh get /cluster/resources --type vm` on {host} lists them all",
        )
    if has(r"sudo: .*password is required", r"sudo: .*terminal is required", r"sudo: no tty present"):
        return NotPermitted(
            f"sudo on {host} asks for a password",
            f"add to /etc/sudoers.d/dflash there: `{sudoers_line(entry)}`",
        )
    if has(r"not allowed to (execute|run sudo)", r"is not in the sudoers file"):
        return NotPermitted(
            f"sudo on {host} does not allow this user to enter container {vmid}",
            f"add to /etc/sudoers.d/dflash there: `{sudoers_line(entry)}`",
        )
    if has(
        r"sudo: (command )?not found", r"sudo: No such file", r"Unknown command:? '?sudo", r"command not found: sudo"
    ):
        return Misconfigured(f"there is no sudo on {host}", "install it, or set `sudo: false` and log in as root")
    escaped = re.escape(path)
    if has(
        rf"{escaped}: (command )?not found",
        rf"{escaped}'?: No such file",
        rf"no such file or directory: {escaped}",
        rf"command not found: {escaped}",
        rf"Unknown command:? '?{escaped}",
    ):
        return Misconfigured(f"there is no {path} on {host}", "is this host a Proxmox VE node, and the right one?")
    if has(r"ipcc_send_rec", r"Unable to load access control list", r"please run as root", r"you are not root"):
        return NotPermitted(
            f"{tool} on {host} needs root",
            f"log in as root (`user: root`), or set `sudo: true` and add to sudoers: `{sudoers_line(entry)}`",
        )
    if has(rf"{escaped}: Permission denied", rf"permission denied: {escaped}"):
        return NotPermitted(f"this user may not run {path} on {host}", "log in as root, or set `sudo: true`")
    if has(r"(CT|VM) is locked", r"can't lock file", r"is locked \("):
        return Unanswered(
            f"container {vmid} on {host} is locked (a backup or migration runs)", "try again when it ends"
        )
    if has(r"Failed to exec \"/bin/sh\"", r"exec: \"/bin/sh\""):
        return Misconfigured(f"there is no /bin/sh in container {vmid}", "is it a Linux system container?")
    if has(r"parameter verification failed", r"unable to parse option", r"Unknown option"):
        return Misconfigured(
            f"{tool} on {host} did not take its options", "Proxmox VE 8.2 or newer is needed", detail=text
        )
    if has(r"lxc-attach: .*"):
        line = re.search(r"lxc-attach: .*", text)
        said = re.sub(r"^.*: \d+ ", "", line[0]) if line else ""
        if has(r"Permission denied", r"Operation not permitted"):
            return NotPermitted(f"lxc-attach on {host} needs root: {said}", "log in as root, or set `sudo: true`")
        return Unreachable(f"lxc-attach on {host} could not enter container {vmid}: {said}", "is it running?")
    return None
