"""Lists a container's runs, each with its verdict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash_ops.document import Document
from dflash_ops.remote.protocol import RunsRequest
from dflash_ops.run.last_known import remember
from dflash_ops.run.probes.snapshot import read_snapshot
from dflash_ops.run.status import Status, status_of
from dflash_ops.verbs.session import Session


class Runs(Document):
    """The answer of `dflash runs`: newest first."""

    kind: Literal["runs"] = "runs"
    container: str
    runs: tuple[Status, ...]
    total: int = Field(description="Runs that the container has, shown or not")


def runs(session: Session, count: int) -> Runs:
    """The newest `count` runs of the container, each judged like `dflash status` does."""
    request: RunsRequest = {"root": session.root, "count": count}
    reply = session.call("runs", request, deadline=90)
    found = tuple(status_of(read_snapshot(frame.value), session.container_name) for frame in reply.events)
    for one in reversed(found):  # the newest is remembered last
        remember(session.inventory.path, session.container_name, one.run, one.state, one.reason)
    total = reply.value.get("total")
    return Runs(container=session.container_name, runs=found, total=total if isinstance(total, int) else len(found))
