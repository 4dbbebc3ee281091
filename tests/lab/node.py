"""Is PID 1 of the lab's Proxmox node: of its mount, PID and UTS namespaces.

Run by `lab.py` as `unshare --mount --pid --uts --fork ... python node.py STATE`. The node shares this machine's
network and programs, but /etc, /usr/sbin and /run are its own, so that it has an /etc/pve, users and a
`/usr/sbin/pct` of which the machine knows nothing. When this process ends, the kernel ends all that ran on the
node (sshd, its sessions, the containers) and drops every mount: nothing is left to clean but files and cgroups.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

DOTFILES = (".bashrc", ".bash_profile", ".bash_login", ".profile", ".zshenv", ".zshrc")


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def overlay(target: Path, private: Path, seed: Path) -> None:
    """Give `target` a private, writable layer that starts with the files of `seed`."""
    upper, work = private / f"{target.name}-upper", private / f"{target.name}-work"
    upper.mkdir()
    work.mkdir()
    if seed.is_dir():
        shutil.copytree(seed, upper, symlinks=True, dirs_exist_ok=True)
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={target},upperdir={upper},workdir={work}", target)


def build(state: Path) -> None:
    private = state / "node"
    mount("-t", "tmpfs", "-o", "mode=755", "dflash-lab", private)
    overlay(Path("/etc"), private, state / "seed/etc")
    overlay(Path("/usr/sbin"), private, state / "seed/sbin")
    mount("-t", "tmpfs", "-o", "mode=755", "dflash-lab-run", "/run")
    for folder in ("/run/sshd", "/run/lock/lxc"):
        Path(folder).mkdir(parents=True)
    (private / "home").mkdir()
    for name in DOTFILES:  # the developer's own shell start-up files are no part of the node
        path = Path("/root", name)
        if path.is_file():
            mount("--bind", "/dev/null", path)
    socket.sethostname("vm")


def main() -> None:
    build(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:  # sessions and attached commands whose parent is gone end up here
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigtimedwait({signal.SIGCHLD}, 60)


if __name__ == "__main__":
    main()
