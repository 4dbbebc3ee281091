"""Breaks a node or a container: each fault is a context manager that takes it back."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from tests.lab.lab import VMID, Lab

NOISY_SHELL = """\
#!/bin/sh
echo 'Welcome to vm! 3 updates can be applied.'
echo 'perl: warning: Setting locale failed.' >&2
exec /bin/bash "$@"
"""


@contextlib.contextmanager
def login_shell(lab: Lab, shell: str) -> Iterator[None]:
    """root's shell on the node; `noisy` is a bash that prints a message of the day first."""
    if shell == "noisy":
        shell = "/etc/dflash-lab/noisy-shell"
        lab.node("tee", shell, input=NOISY_SHELL)
        lab.node("chmod", "755", shell)
    lab.node("usermod", "--shell", shell, "root")
    try:
        yield
    finally:
        lab.node("usermod", "--shell", "/bin/bash", "root")


@contextlib.contextmanager
def user(lab: Lab, name: str, sudoers: str | None = None) -> Iterator[None]:
    """A login on the node that takes the lab's keys, with this line in sudoers."""
    home = lab.state / "node/home" / name
    lab.node("useradd", "--create-home", "--home-dir", str(home), "--shell", "/bin/bash", "--password", "*", name)
    rule = f"/etc/sudoers.d/{name}"
    if sudoers is not None:
        lab.node("tee", rule, input=sudoers + "\n")
        lab.node("chmod", "440", rule)
    try:
        yield
    finally:
        lab.node("userdel", "--remove", name, check=False)
        lab.node("rm", "-f", rule)


@contextlib.contextmanager
def no_pct(lab: Lab) -> Iterator[None]:
    """A node that is no Proxmox node."""
    lab.node("mv", "/usr/sbin/pct", "/usr/sbin/pct.away")
    try:
        yield
    finally:
        lab.node("mv", "/usr/sbin/pct.away", "/usr/sbin/pct")


@contextlib.contextmanager
def no_python(lab: Lab) -> Iterator[None]:
    """A container without python3."""
    moved = "for p in /usr/bin/python3*; do case $p in *.away) ;; *) mv $p $p.away ;; esac; done"
    back = "for p in /usr/bin/python3*.away; do mv $p ${p%.away}; done"
    lab.container("sh", "-c", moved)
    try:
        yield
    finally:
        lab.container("sh", "-c", back)


@contextlib.contextmanager
def small_disk(lab: Lab, folder: str, mebibytes: int) -> Iterator[None]:
    """A file system of its own on a folder of the container."""
    lab.container("mkdir", "-p", folder)
    lab.container("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", folder)
    try:
        yield
    finally:
        lab.container("umount", "--lazy", folder)


def fill(lab: Lab, folder: str, leave_kibibytes: int = 0) -> None:
    """Write until no more than this is free."""
    path = shlex.quote(f"{folder}/filler")
    lab.container("sh", "-c", f"dd if=/dev/zero of={path} bs=64k 2>/dev/null; sync; true")
    if leave_kibibytes:
        size = int(lab.container("stat", "-c", "%s", f"{folder}/filler").stdout)
        lab.container("truncate", "-s", str(size - leave_kibibytes * 1024), f"{folder}/filler")


@contextlib.contextmanager
def locked(lab: Lab, kind: str = "backup") -> Iterator[None]:
    """The container's configuration is locked, as during a backup."""
    path = f"/etc/pve/nodes/vm/lxc/{VMID}.conf"
    lab.node("sed", "-i", f"$ a lock: {kind}", path)
    try:
        yield
    finally:
        lab.node("sed", "-i", "/^lock:/d", path)


@contextlib.contextmanager
def frozen(lab: Lab) -> Iterator[None]:
    """The container is frozen, as a backup in suspend mode does for a while."""
    lab.freeze()
    try:
        yield
    finally:
        lab.thaw()


@contextlib.contextmanager
def nvidia_smi(lab: Lab, script: str) -> Iterator[None]:
    """A program of that name in the container; `script` is its text for /bin/sh."""
    path = "/usr/bin/nvidia-smi"
    lab.container("tee", path, input=f"#!/bin/sh\n{script}\n")
    lab.container("chmod", "755", path)
    try:
        yield
    finally:
        lab.container("rm", "-f", path)
