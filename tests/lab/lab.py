"""Raises a Proxmox node with a container on this machine (`Lab`): sshd, `pct`, LXC, systemd.

    python -m tests.lab.lab up|down|status [--state DIR]

A lab is a state folder and one process tree. The node is a set of namespaces (see node.py) in which sshd listens on
loopback and LXC runs container 200; container 201 is configured but stopped; 999 does not exist. Labs with different
state folders stand side by side. What a killed `up` left is cleared by the next `up` or `down`: the node's processes
are found by their command line, its cgroups by their name, and everything else lies in the state folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.network import FarAway, far_away
from tests.lab.rootfs import TETHER, cached_tarball

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_STATE = REPOSITORY / ".lab"
DEFAULT_PORT = 22022  # what inventory.yaml says of the hands-on lab
CACHE = REPOSITORY / ".cache" / "lab"
SMALL_TARGET = REPOSITORY / ".cache" / "small-target"
SMALL_TARGET_INSIDE = "/srv/small-target"
HERE = Path(__file__).resolve().parent
NODE_NAME = "vm"
VMID, STOPPED_VMID, MISSING_VMID = 200, 201, 999
NEEDED = ("lxc-start", "lxc-attach", "sshd", "ssh", "ssh-keygen", "mmdebstrap", "unshare", "nsenter", "perl", "sudo")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

T = TypeVar("T")
Completed = subprocess.CompletedProcess[str]


class LabError(Exception):
    """The lab cannot stand here; the message says why and what to do."""


def why_not() -> str | None:
    """One sentence with the cure where a lab cannot run, else None."""
    if sys.platform != "linux":
        return f"The lab needs Linux (this is {sys.platform}): run it in a Debian 12 virtual machine."
    if os.geteuid() != 0:
        return "The lab needs root, for LXC and namespaces: run the same command as root."
    missing = [name for name in NEEDED if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"The lab needs {', '.join(missing)}: run `make lab-packages` (Debian's apt)."
    return None


def wait_for(what: str, probe: Callable[[], T | None], seconds: float = 30) -> T:
    """The first true answer of `probe`, asked ten times a second."""
    end = time.monotonic() + seconds
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise LabError(f"Waited {seconds:.0f} s in vain: {what}.")
        time.sleep(0.1)


def processes_with(*words: str) -> list[int]:
    """Processes of this machine whose command line has every one of these words, in ascending order."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if all(word.encode() in arguments for word in words):
                    found.append(int(entry.name))
    return sorted(found)


def free_port(wanted: int = 0) -> int:
    """`wanted`, or any port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            raise LabError(
                f"Port {wanted} of 127.0.0.1 is taken, perhaps by the lab of another checkout: "
                f"`make lab-down` there, or stop what listens on it."
            ) from None
        return int(probe.getsockname()[1])


class Lab:
    """One lab; all that it is can be found again from its state folder."""

    def __init__(self, state: Path, *, tethered: bool = False) -> None:
        self.state = state.resolve()
        self.tethered = tethered  # the node dies with this process: a killed test run leaves no lab behind
        self.identity = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        self.ssh = self.state / "ssh"
        self.lxc = self.state / "lxc"
        self.key = self.ssh / "id_ed25519"
        self.known_hosts = self.ssh / "known_hosts"

    # ---- up and down ---------------------------------------------------------------------------------------

    def up(self) -> None:
        """Raise the lab, or leave a healthy one as it is. Clears what a killed attempt left."""
        reason = why_not()
        if reason:
            raise LabError(reason)
        with self._exclusive():
            if self.healthy():
                return
            self._down()
            tarball = cached_tarball(CACHE)
            self._make_ssh(free_port(DEFAULT_PORT if self.state == DEFAULT_STATE.resolve() else 0))
            self._make_container(VMID, tarball)
            self._make_container(STOPPED_VMID, None)
            self._seed_node()
            self._start_node()
            self.start_sshd()
            self.start_container()
            (self.state / "ready").touch()

    def down(self) -> None:
        """Leave nothing of the lab: no process, mount, cgroup or file."""
        with self._exclusive():
            self._down()

    def healthy(self) -> bool:
        return (
            (self.state / "ready").exists()
            and self.node_pid() is not None
            and self._listening()
            and self.container_pid() is not None
        )

    def recover(self) -> None:
        """Undo what a test did to sshd and the container: both run again afterwards."""
        if not self._listening():
            self.start_sshd()
        if self.container_pid() is None:
            self.start_container()
        elif self.node("lxc-info", "-n", str(VMID), "--no-humanize", "--state").stdout.strip() == "FROZEN":
            self.thaw()

    def _down(self) -> None:
        if self.node_pid() is not None:  # ask LXC first: it removes its cgroups
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.node("lxc-stop", "-n", str(VMID), "--kill", check=False, timeout=20)
        for pid in reversed(self._node_processes()):  # PID 1 of the namespace first: the rest dies with it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for("the node's processes end", lambda: not self._node_processes())
        for cgroup in self.cgroups():
            wait_for(f"the cgroup {cgroup} is empty", functools.partial(removed, cgroup))
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        left = [path for path in mounts if Path(path).is_relative_to(self.state)]
        if left:
            raise LabError(f"Something outside the lab mounted {', '.join(left)}: unmount it, then run this again.")
        if self.state.exists():
            shutil.rmtree(self.state)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One `up` or `down` at a time. The lock is on the parent folder, which outlives the state."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.state.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    # ---- the parts -----------------------------------------------------------------------------------------

    @property
    def _cgroup(self) -> str:
        return f"dflash-lab-{self.identity}"

    def cgroups(self) -> list[Path]:
        """The lab's folders in every hierarchy, inner ones first. os.walk, because others come and go meanwhile."""
        walked = (Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup", topdown=False))
        return [folder for folder in walked if self._cgroup in folder.parts]

    def _make_ssh(self, port: int) -> None:
        self.ssh.mkdir(parents=True, mode=0o700)
        self.make_key("id_ed25519")
        self.make_key("host_ed25519")
        kind, key, *_ = (self.ssh / "host_ed25519.pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
        locked = subprocess.run(["getent", "shadow", "root"], capture_output=True, text=True).stdout.split(":")[1:2]
        settings = {
            "ListenAddress": f"127.0.0.1:{port}",
            "HostKey": self.ssh / "host_ed25519",
            "AuthorizedKeysFile": "/etc/dflash-lab/authorized_keys",  # sshd reads it as the user who logs in
            "PidFile": "/run/sshd/lab.pid",
            "PermitRootLogin": "prohibit-password",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "StrictModes": "no",  # the state folder may lie under a folder that others can write to
            "UsePAM": "yes" if locked and locked[0].startswith("!") else "no",  # without PAM a locked root is refused
            "AcceptEnv": "LANG LC_*",
            "PrintMotd": "no",
            "MaxStartups": "100:30:200",
            "MaxSessions": "100",
            "Subsystem": "sftp internal-sftp",
        }
        (self.ssh / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        (self.ssh / "port").write_text(f"{port}\n")

    def make_key(self, name: str) -> Path:
        path = self.ssh / name
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"dflash-lab {name}", "-f", str(path)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return path

    def _make_container(self, vmid: int, tarball: Path | None) -> None:
        folder = self.lxc / str(vmid)
        rootfs = folder / "rootfs"
        rootfs.mkdir(parents=True)
        if tarball is not None:
            unpack = ["tar", "-xpf", str(tarball), "--numeric-owner", "-C", str(rootfs)]
            subprocess.run([*TETHER, *unpack], check=True)
            (rootfs / "etc/hostname").write_text(f"ct{vmid}\n")
        SMALL_TARGET.mkdir(parents=True, exist_ok=True)
        shared = {str(REPOSITORY / ".venv"): str(REPOSITORY / ".venv"), str(SMALL_TARGET): SMALL_TARGET_INSIDE}
        if sys.base_prefix != "/usr":  # the container has Debian's own interpreter
            shared[sys.base_prefix] = sys.base_prefix
        settings = [
            ("lxc.uts.name", f"ct{vmid}"),
            ("lxc.rootfs.path", f"dir:{rootfs}"),
            ("lxc.net.0.type", "empty"),
            ("lxc.mount.auto", "proc:mixed sys:mixed cgroup:mixed"),
            ("lxc.apparmor.profile", "unconfined"),
            ("lxc.signal.halt", "SIGRTMIN+3"),
            ("lxc.environment", "TERM=linux"),
            ("lxc.cgroup.dir", f"{self._cgroup}/{vmid}"),
            ("lxc.cap.drop", "mac_admin mac_override sys_time sys_module sys_rawio"),
            ("lxc.tty.max", "0"),
            ("lxc.pty.max", "1024"),
        ]
        for source, inside in shared.items():
            options = "bind,ro,create=dir"
            settings.append(
                ("lxc.mount.entry", f"{fstab(source)} {fstab(inside.lstrip('/'))} none {options} 0 0"),
            )
        (folder / "config").write_text("".join(f"{key} = {value}\n" for key, value in settings))

    def _seed_node(self) -> None:
        etc, sbin = self.state / "seed/etc", self.state / "seed/sbin"
        configs = etc / "pve/nodes" / NODE_NAME / "lxc"
        configs.mkdir(parents=True)
        for vmid in (VMID, STOPPED_VMID):
            (configs / f"{vmid}.conf").write_text(
                f"arch: amd64\ncores: 2\nhostname: ct{vmid}\nmemory: 4096\nostype: debian\n"
                f"rootfs: local:{vmid}/vm-{vmid}-disk-0.raw,size=8G\nswap: 0\n"
            )
        (etc / "lxc").mkdir()
        (etc / "lxc/lxc.conf").write_text(f"lxc.lxcpath = {self.lxc}\n")
        (etc / "hostname").write_text(f"{NODE_NAME}\n")
        (etc / "dflash-lab").mkdir()
        shutil.copy(self.key.with_suffix(".pub"), etc / "dflash-lab/authorized_keys")
        sbin.mkdir(parents=True)
        shutil.copy2(HERE / "pct", sbin / "pct")

    def _start_node(self) -> None:
        (self.state / "node").mkdir()
        namespaces = ["--mount", "--propagation", "private", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["unshare", *namespaces, sys.executable, str(HERE / "node.py"), str(self.state)]
        if self.tethered:
            command = [*TETHER, *command]
        with (self.state / "node.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            process.kill()
            process.wait()
            raise LabError(f"The lab's node did not start: {(self.state / 'node.log').read_text().strip()}")
        process.stdout.close()

    # ---- the node ------------------------------------------------------------------------------------------

    def _node_processes(self) -> list[int]:
        return processes_with(str(HERE / "node.py"), str(self.state))

    def node_pid(self) -> int | None:
        """This machine's number of the node's PID 1."""
        for pid in self._node_processes():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and len(line.split()) > 2:
                        return pid
        return None

    def in_node(self, *argv: str) -> list[str]:
        """The command that runs `argv` on the node, as its root."""
        pid = self.node_pid()
        if pid is None:
            raise LabError(f"The lab in {self.state} is down.")
        return ["nsenter", "--target", str(pid), "--mount", "--uts", "--pid", "--", *argv]

    def node(self, *argv: str, check: bool = True, timeout: float = 60, **options: Any) -> Completed:
        """Run a command on the node, past ssh."""
        environment = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/root"}
        return run(self.in_node(*argv), check=check, timeout=timeout, env=environment, cwd="/", **options)

    @property
    def port(self) -> int:
        return int((self.ssh / "port").read_text())

    def start_sshd(self) -> None:
        self.node("/usr/sbin/sshd", "-f", str(self.ssh / "sshd_config"), "-E", str(self.state / "sshd.log"))
        wait_for("sshd listens", self._listening)

    def stop_sshd(self, *, sessions: bool = False) -> None:
        """The listener goes; with `sessions`, every connection that it serves too."""
        if sessions:
            self.node("pkill", "-KILL", "-x", "sshd", check=False)
        else:
            self.node("sh", "-c", "kill $(cat /run/sshd/lab.pid)")
        wait_for("sshd no longer listens", lambda: not self._listening())

    def _listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(2)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def ssh_command(self, key: str = "id_ed25519", user: str = "root") -> list[str]:
        """OpenSSH's client with nothing of this machine's own configuration; the remote command follows."""
        options = {
            "IdentityFile": self.ssh / key,
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.known_hosts,
            "StrictHostKeyChecking": "yes",
            "BatchMode": "yes",
            "LogLevel": "ERROR",
            "SendEnv": "LANG LC_*",
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return ["ssh", "-F", "none", "-T", "-p", str(self.port), *words, f"{user}@127.0.0.1"]

    @functools.cached_property
    def far_away(self) -> FarAway:
        """A laptop on a cable that can be unplugged."""
        return far_away(self)

    @contextlib.contextmanager
    def slow_pct(self, seconds: float) -> Iterator[None]:
        """`pct` takes this long to start: about 0.8 on a real node, an hour for one that hangs."""
        switch = "/etc/dflash-lab/pct-delay"
        self.node("sh", "-c", f"echo {seconds} >{switch}")
        try:
            yield
        finally:
            self.node("rm", "-f", switch)

    # ---- the container -------------------------------------------------------------------------------------

    def container_pid(self) -> int | None:
        """The node's number of the container's init, None when it is stopped."""
        answer = self.node("lxc-info", "-n", str(VMID), "--no-humanize", "--pid", check=False).stdout.strip()
        return int(answer) if answer.isdigit() and int(answer) > 0 else None

    def start_container(self) -> None:
        """Start container 200 and wait for its systemd."""
        self.node("pct", "start", str(VMID))
        self.wait_booted()

    def wait_booted(self) -> None:
        wait_for("the container's systemd is up", self._booted)

    def _booted(self) -> bool:
        state = self.container("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    def stop_container(self) -> None:
        """As a pulled plug: no service is asked to stop."""
        self.node("pct", "stop", str(VMID))

    def restart_container(self) -> None:
        self.stop_container()
        self.start_container()

    def freeze(self) -> None:
        self.node("lxc-freeze", "-n", str(VMID))

    def thaw(self) -> None:
        self.node("lxc-unfreeze", "-n", str(VMID))

    def container(self, *argv: str, check: bool = True, timeout: float = 60, **options: Any) -> Completed:
        """Run a command in container 200, past ssh and `pct`."""
        return self.node(
            "lxc-attach", "-n", str(VMID), "--clear-env", "--", *argv, check=check, timeout=timeout, **options
        )


def removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except OSError:  # still busy, or gone
        return not cgroup.exists()
    return True


def fstab(path: str) -> str:
    """A path as a field of fstab."""
    return path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


def run(command: Sequence[str], *, check: bool, timeout: float, **options: Any) -> Completed:
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    if options["stdin"] is None:
        del options["stdin"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, **options)
    if check and done.returncode != 0:
        raise LabError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.lab", description="The hands-on lab")
    parser.add_argument("verb", choices=["up", "down", "status"])
    parser.add_argument("--state", type=Path, default=DEFAULT_STATE, help="state folder (default: .lab)")
    options = parser.parse_args()
    lab = Lab(options.state)
    try:
        if options.verb == "up":
            lab.up()
        elif options.verb == "down":
            lab.down()
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    if options.verb == "down":
        print("lab: down, nothing left")
    elif lab.healthy():
        print(f"lab: up; ssh -p {lab.port} -i {lab.key} -o UserKnownHostsFile={lab.known_hosts} root@127.0.0.1")
    else:
        print("lab: down")
    return 0


if __name__ == "__main__":
    sys.exit(main())
