"""Builds the root file system of the containers once: a small Debian with systemd and Python."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "procps", "util-linux", "ca-certificates")
EXCLUDED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
# Units that a container without a network or a console has no use for: they slow the boot or fail.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@.service",
    "getty.target",
    "networking.service",
    "systemd-logind.service",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
)


# Put before a command: it dies with the process that started it.
TETHER = ("setpriv", "--pdeathsig", "KILL")


def host_suite() -> str:
    """The machine's own release, so that an interpreter bind-mounted from it finds the C library it was linked to."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "bookworm")


def cached_tarball(cache: Path) -> Path:
    """The root file system as a tar file; built when `cache` has none of this recipe. Safe to be called at once
    by several processes, and to be killed: a file with the final name is always whole."""
    suite = host_suite()
    recipe = json.dumps([suite, PACKAGES, EXCLUDED, MASKED])
    tarball = cache / f"rootfs-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "rootfs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tarball.exists():
            for stale in cache.glob("rootfs-*.tar*"):
                stale.unlink()
            # A name of its own: what a killed build left running may still write to the one it had.
            partial = tarball.with_suffix(f".tar.{os.getpid()}")
            build(suite, partial)
            partial.replace(tarball)
    return tarball


def build(suite: str, target: Path) -> None:
    print(f"lab: building the container's root file system ({suite}), about half a minute, once", flush=True)
    masks = "; ".join(f'ln -sf /dev/null "$1/etc/systemd/system/{unit}"' for unit in MASKED)
    log = target.parent / "rootfs.log"
    command = [
        *TETHER,
        "mmdebstrap",
        "--mode=root",
        "--format=tar",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED),
        f"--customize-hook={masks}",
        '--customize-hook=rm -f "$1/etc/resolv.conf"; : > "$1/etc/machine-id"',
        suite,
        str(target),
    ]
    with log.open("w") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"lab: mmdebstrap could not build the root file system (its log: {log}):\n{tail}")
    log.unlink()
