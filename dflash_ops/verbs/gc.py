"""What may go from the container, and how much room does that give? Shown first; removed only when said so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document
from dflash_ops.text import visible
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
    """What may go, and what went."""

    kind: Literal["gc"] = "gc"
    container: str
    items: list[Item]
    removed: list[str] = Field(description="Paths; empty in a dry run")

    @property
    def bytes(self) -> int:
        """All items together."""
        return sum(item.bytes for item in self.items)


def look(session: Session, options: GcOptions) -> GcReport:
    """What may go. Nothing is removed."""
    return _ask(session, options, None)


def remove(session: Session, options: GcOptions, agreed: GcReport) -> GcReport:
    """Remove what `look` listed, but for what a run has begun to use since."""
    return _ask(session, options, [item.path for item in agreed.items])


def _ask(session: Session, options: GcOptions, paths: list[str] | None) -> GcReport:
    request = {
        "keep": options.keep,
        "older_than": options.older_than * 86400,
        "caches": options.caches,
        "remove": paths,
    }
    if paths is not None:
        session.so_far = "what was said to be removed is gone, the rest stays; `dflash gc` lists it"
    for frame in session.stream("gc", request, deadline_between_frames=600):
        if frame.kind == "result":
            answer = parsed(_Collected, frame.value)
            return GcReport(container=session.container_name, items=answer.items, removed=answer.removed)
        session.say(f"removed {visible(str(frame.value.get('removed')))}")
    raise AssertionError("a stream ends with a result or an error")
