"""Does the way into the container work? Returns what it was sent; counts the payload."""

from __future__ import annotations

from typing import Any, Dict

from dflash_ops.remote.common import Channel


def main(request: Dict[str, Any], channel: Channel) -> Dict[str, Any]:
    """Answer with the request and the payload's size in bytes."""
    size = 0
    while True:
        chunk = channel.payload.read(1 << 16)
        if not chunk:
            break
        size += len(chunk)
    return {"request": request, "payload_bytes": size}
