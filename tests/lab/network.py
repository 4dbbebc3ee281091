"""Puts the laptop into a network of its own, on a cable that tests can pull.

The laptop's network is a namespace that a process of the node holds, joined to this machine by a veth pair; a second
sshd listens at the near end. Unplugged, packets vanish: no reset, no refusal. All of it dies with the node.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.lab.lab import Lab


class FarAway:
    """The second way to a lab's node. `enter` is put before a command that shall run on the far laptop."""

    def __init__(self, lab: Lab, holder: int, address: str, port: int) -> None:
        self._lab = lab
        self._near = near_end(lab)
        self.address = address
        self.port = port
        self.enter = ["nsenter", f"--net=/proc/{holder}/ns/net", "--"]

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """As if the cable were cut: the far side's packets are dropped, and it is told nothing."""
        ip("link", "set", self._near, "down")
        try:
            yield
        finally:
            ip("link", "set", self._near, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdin=subprocess.DEVNULL)


def near_end(lab: Lab) -> str:
    return f"dfl{lab.identity}n"


def far_away(lab: Lab) -> FarAway:
    """Lay the cable and start the second sshd, once a lab."""
    from tests.lab.lab import free_port, processes_with, wait_for

    marker = f"dflash-far-{lab.identity}"
    number = int(lab.identity[:4], 16)
    net, host = f"10.{200 + number % 50}.{number // 256}", number % 64 * 4
    near, far = f"{net}.{host + 1}", f"{net}.{host + 2}"
    port = free_port()
    lab.node("sh", "-c", f"unshare --net perl -e 'sleep' {marker} </dev/null >/dev/null 2>&1 &")
    [holder] = wait_for("the far network is there", lambda: processes_with("perl", marker))
    far_name = f"dfl{lab.identity}f"
    ip("link", "add", near_end(lab), "type", "veth", "peer", "name", far_name, "netns", str(holder))
    ip("address", "add", f"{near}/30", "dev", near_end(lab))
    ip("link", "set", near_end(lab), "up")
    inside = ["nsenter", f"--net=/proc/{holder}/ns/net", "--", "ip"]
    for words in (["address", "add", f"{far}/30", "dev", far_name], ["link", "set", far_name, "up"]):
        subprocess.run([*inside, *words], check=True, stdin=subprocess.DEVNULL)
    settings = (lab.ssh / "sshd_config").read_text().replace("/run/sshd/lab.pid", "/run/sshd/far.pid")
    lines = [line for line in settings.splitlines() if not line.startswith("ListenAddress")]
    config = lab.ssh / "sshd_config_far"
    config.write_text("\n".join([f"ListenAddress {near}:{port}", *lines]) + "\n")
    lab.node("/usr/sbin/sshd", "-f", str(config), "-E", str(lab.state / "sshd-far.log"))
    kind, key, *_ = (lab.ssh / "host_ed25519.pub").read_text().split()
    with lab.known_hosts.open("a") as known:
        known.write(f"[{near}]:{port} {kind} {key}\n")
    return FarAway(lab, holder, near, port)
