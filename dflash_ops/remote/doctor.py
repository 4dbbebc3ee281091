"""Collects what `dflash doctor` judges: the container's facts, or on the host itself the node's view of it."""

from __future__ import annotations

from typing import Any, Dict, Union, cast

from dflash_ops.remote.channel import Channel
from dflash_ops.remote.protocol import FactsRequest, NodeRequest


def main(request: Union[FactsRequest, NodeRequest], channel: Channel) -> Dict[str, Any]:
    """request: `do`: facts (see `facts.collect`) or node (see `node.look`), and what that one takes."""
    if request["do"] == "node":
        from dflash_ops.remote import node

        return node.look(cast(NodeRequest, request))
    from dflash_ops.remote import facts

    return facts.collect(cast(FactsRequest, request))
