"""Shows the host key of each hop, asks, and writes down the keys that are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from dflash_ops.document import Document
from dflash_ops.errors import UsageError
from dflash_ops.inventory.models import Inventory
from dflash_ops.transport.base import NotPermitted
from dflash_ops.transport.hosts import ssh_host
from dflash_ops.transport.known_hosts import UnknownKey


class TrustedKey(BaseModel):
    """A host key that was accepted now."""

    host: str
    kind: str
    fingerprint: str
    known_hosts: Path


class TrustReport(Document):
    """What became of it."""

    kind: Literal["trust"] = "trust"
    host: str
    accepted: list[TrustedKey]
    logged_in: bool


def trust(inventory: Inventory, host: str, ask: Callable[[UnknownKey], bool]) -> TrustReport:
    """Connect to a host of the inventory, asking about each unknown key on the way.

    Raises DflashError: a changed key is never taken, and refusing a key ends it.
    """
    if host not in inventory.hosts:
        raise UsageError(f"the inventory has no host {host!r}", f"known: {', '.join(inventory.hosts) or 'none'}")
    accepted: list[TrustedKey] = []

    def accept(key: UnknownKey) -> bool:
        if not ask(key):
            return False
        accepted.append(
            TrustedKey(host=key.host, kind=key.kind, fingerprint=key.fingerprint, known_hosts=key.known_hosts)
        )
        return True

    connection = ssh_host(host, inventory, accept)
    logged_in = True
    try:
        connection.connect()
    except NotPermitted:
        # The key stands in the file; that no user key fits is another matter.
        if not accepted:
            raise
        logged_in = False
    finally:
        connection.close()
    return TrustReport(host=host, accepted=accepted, logged_in=logged_in)
