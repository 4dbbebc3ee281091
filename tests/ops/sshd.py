"""A real sshd on loopback, for the tests of the ssh transports."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import DflashError
from dflash_ops.inventory.models import Inventory
from dflash_ops.transport.base import Program
from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.hosts import RemoteHost, ssh_host
from dflash_ops.transport.program import BOOTSTRAP

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
NEEDS_SSHD = pytest.mark.skipif(SSHD is None, reason="sshd is not installed here")


@dataclass
class Server:
    """An sshd of this test session."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    via: str = "paramiko"

    @property
    def known_line(self) -> str:
        kind, key = (self.folder / "host.pub").read_text().split()[:2]
        return f"[127.0.0.1]:{self.port} {kind} {key}\n"

    def entry(self, **changes: Any) -> dict[str, Any]:
        return {
            "address": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identity": str(self.folder / "user"),
            "known_hosts": str(self.folder / "known_hosts"),
            "ssh_config": str(self.folder / "ssh_config"),
            "connect_timeout": 5,
            "via": self.via,
            **changes,
        }


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_sshd(folder: Path, **changes: object) -> Iterator[Server]:
    """An sshd with keys of its own; `changes` are keywords of its configuration."""
    for name in ("host", "user", "stranger"):
        make_key(folder / name)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    shadow = subprocess.run(["getent", "shadow", getpass.getuser()], capture_output=True, text=True, check=False)
    locked = shadow.stdout.split(":")[1:2]
    port = free_port()
    settings: dict[str, object] = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "yes" if locked and locked[0].startswith("!") else "no",
        **changes,
    }
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    (folder / "ssh_config").write_text("")
    process = subprocess.Popen(
        [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL, start_new_session=True
    )
    found = Server(folder, port, process)
    (folder / "known_hosts").write_text(found.known_line)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.05)
    try:
        yield found
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of a module."""
    with running_sshd(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture(params=["paramiko", "openssh"])
def server(sshd: Server, request: pytest.FixtureRequest) -> Server:
    """The same server, reached by each transport."""
    return dataclasses.replace(sshd, via=request.param)


@pytest.fixture(params=["paramiko", "openssh"])
def via(request: pytest.FixtureRequest) -> str:
    """Each transport, for tests with servers of their own."""
    return str(request.param)


def make_inventory(folder: Path, **hosts: dict[str, Any]) -> Inventory:
    return Inventory.model_validate({"path": folder / "inventory.yaml", "hosts": hosts, "containers": {}})


def open_host(folder: Path, **hosts: dict[str, Any]) -> RemoteHost:
    return ssh_host("main", make_inventory(folder, **hosts))


def ask(host: RemoteHost, folder: Path) -> dict[str, Any]:
    way = FramedTransport(host, BOOTSTRAP, lambda text, status: None)
    try:
        return way.run(Program("env"), {"root": str(folder), "do": "list"}, deadline=30).value
    finally:
        way.close()


def refusal(folder: Path, **entry: Any) -> DflashError:
    with pytest.raises(DflashError) as caught:
        ask(open_host(folder, main=entry), folder)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def ssh_client(name: str, config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What OpenSSH's own client makes of it."""
    words = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", *options, "--", name, "echo in"]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
