"""Lists what nothing in the container uses, and removes it when told to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document
from dflash_ops.remote.protocol import GcRequest
from dflash_ops.text import visible
from dflash_ops.transport.base import result_of
from dflash_ops.verbs.session import Session, parsed


@dataclass(frozen=True)
class GcOptions:
    """What is kept."""

    keep: int = 10  # newest ended runs
    older_than: float = 14.0  # days since a run's end, or a compile cache's last use
    caches: bool = False  # all of them, whatever their age


class Item(BaseModel):
    """A folder that nothing uses; of a compile cache `why` names torch, GPU and last use."""

    path: str
    kind: Literal["run", "release", "environment", "leftover", "cache"]
    bytes: int = Field(ge=0)
    why: str


class _Collected(BaseModel):
    items: list[Item]
    removed: list[str]


class GcReport(Document):
    """What can be removed, and what was."""

    kind: Literal["gc"] = "gc"
    container: str
    items: list[Item]
    removed: list[str] = Field(description="Paths; empty in a dry run")

    @property
    def bytes(self) -> int:
        """All items together."""
        return sum(item.bytes for item in self.items)


def look(session: Session, options: GcOptions) -> GcReport:
    """List what can be removed; remove nothing."""
    return _ask(session, options, None)


def remove(session: Session, options: GcOptions, agreed: GcReport) -> GcReport:
    """Remove what `look` listed, but for what a run has begun to use since."""
    return _ask(session, options, [item.path for item in agreed.items])


def _ask(session: Session, options: GcOptions, paths: list[str] | None) -> GcReport:
    request: GcRequest = {
        "root": session.root,
        "keep": options.keep,
        "older_than": options.older_than * 86400,
        "caches": options.caches,
        "remove": paths,
    }
    if paths is not None:
        session.so_far = "items reported as removed are gone, nothing else was touched; `dflash gc` lists the rest"
    frames = session.stream("gc", request, deadline_between_frames=600)
    value = result_of(frames, lambda frame: session.say(f"removed {visible(str(frame.value.get('removed')))}"))
    answer = parsed(_Collected, value)
    return GcReport(container=session.container_name, items=answer.items, removed=answer.removed)
