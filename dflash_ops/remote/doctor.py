"""Collects what `dflash doctor` judges: the container's facts, or on the host itself the node's view of it."""

from __future__ import annotations

from typing import Any, Dict

from dflash_ops.remote.channel import Channel


def main(request: Dict[str, Any], channel: Channel) -> Dict[str, Any]:
    """request: `do`: facts (see `facts.collect`) or node (see `node.look`), and what that one takes."""
    if request["do"] == "node":
        from dflash_ops.remote import node

        return node.look(request)
    from dflash_ops.remote import facts

    return facts.collect(request)
