"""Opens a host of the inventory by the ssh transport that its entry names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from dflash_ops.inventory.models import Inventory
from dflash_ops.transport.base import Deadline, Exchange
from dflash_ops.transport.known_hosts import UnknownKey

Accept = Callable[[UnknownKey], bool]


class RemoteHost(Protocol):
    """A Host that can also be connected to without a command."""

    label: str

    def connect(self) -> object:
        """Open the connection. Raises TransportError."""
        ...

    def exchange(self, command: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool) -> Exchange:
        """See Host.exchange."""
        ...

    def close(self) -> None: ...


def ssh_host(name: str, inventory: Inventory, accept: Accept | None = None) -> RemoteHost:
    """Nothing is connected yet. `accept` decides on unknown host keys; without it they are refused."""
    if inventory.hosts[name].via == "openssh":
        from dflash_ops.transport.openssh import OpenSshHost

        return OpenSshHost(name, inventory, accept)
    from dflash_ops.transport.ssh import SshHost  # paramiko takes a fifth of a second to import

    return SshHost(name, inventory, accept)
