"""Holds what a verb works with: one container, one connection to it, and a place to report progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from dflash_ops.run.record import RootPaths
from dflash_ops.text import visible
from dflash_ops.transport.base import BadAnswer, Frame, Program, Reply, Transport

if TYPE_CHECKING:
    from dflash_ops.inventory.models import Inventory

Answer = TypeVar("Answer", bound=BaseModel)


def parsed(model: type[Answer], value: dict[str, Any]) -> Answer:
    """A program's result as the model of it. Raises BadAnswer: the container may send anything."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadAnswer(
            "the container answered in a form that this dflash does not know",
            "is another dflash's program in between? --debug shows the answer's faults",
            detail=str(error),
        ) from error


@dataclass
class Session:
    """Every verb is a function `(session, options) -> model`."""

    inventory: Inventory
    container_name: str
    transport: Transport
    root: str = "/var/lib/dflash"
    quiet: bool = False
    so_far: str = "nothing was changed"  # what the verb has done by now, for Ctrl-C
    paths: RootPaths = field(init=False)

    def __post_init__(self) -> None:
        self.paths = RootPaths(self.root)

    def say(self, text: str) -> None:
        """Progress, on stderr; whatever of it the container wrote is made safe to print."""
        if not self.quiet:
            with contextlib.suppress(BrokenPipeError):  # that nobody reads it does not stop the work
                print("\n".join(map(visible, text.split("\n"))), file=sys.stderr, flush=True)

    def call(
        self,
        verb: str,
        request: Mapping[str, object],
        payload: Iterable[bytes] | None = None,
        deadline: float = 60.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> Reply:
        """Run a remote program to its result; `meanwhile` is called while it runs."""
        return self.transport.run(Program(verb), request, payload, deadline, meanwhile)

    def stream(
        self,
        verb: str,
        request: Mapping[str, object],
        deadline_between_frames: float = 30.0,
        payload: Iterable[bytes] | None = None,
    ) -> Iterator[Frame]:
        """Run a remote program and yield its frames; the last one is its result."""
        return self.transport.stream(Program(verb), request, deadline_between_frames, payload)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.transport.close()


def open_session(inventory: Inventory, container: str | None, *, quiet: bool = False) -> Session:
    """A session with the named container, or the inventory's default one. Nothing is connected yet."""
    name, entry = inventory.container(container)
    return Session(inventory, name, open_transport(inventory, name), entry.root, quiet)


def open_transport(inventory: Inventory, container: str) -> Transport:
    """The way into a container of the inventory."""
    from dflash_ops.transport.framed import FramedTransport

    entry = inventory.containers[container]
    if entry.host == "local":
        from dflash_ops.transport.local import local_transport

        return local_transport()
    from dflash_ops.transport.hosts import ssh_host
    from dflash_ops.transport.pct import enter_command, explain

    host = inventory.hosts[entry.host]
    command = enter_command(entry, sudo=host.sudo)
    explaining = partial(explain, entry=entry, host=entry.host, root=host.sudo or host.user in (None, "root"))
    return FramedTransport(ssh_host(entry.host, inventory), command, explaining)
