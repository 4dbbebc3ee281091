"""Ctrl-C during a verb says what was done."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_ops.transport.base import Frame, Program
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.checkpoint import checkpoint
from dflash_ops.verbs.exec import execute
from dflash_ops.verbs.kill import KillOptions, kill
from dflash_ops.verbs.runs import runs
from dflash_ops.verbs.session import Session
from tests.ops.evidence import INVENTORY


class Interrupted(FakeTransport):
    """Ctrl-C comes after the events that the script gives."""

    def _answer(self, program: Program, request: dict[str, Any], payload: bytes) -> Iterator[Frame]:
        yield from (frame for frame in super()._answer(program, request, payload) if frame.kind == "event")
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("verb", "events", "words"),
    [
        (lambda session: runs(session, 5), {"runs": []}, "nothing was changed"),
        (lambda session: kill(session, KillOptions("r1")), {"kill": []}, "r1 may have been asked to stop"),
        (
            lambda session: kill(session, KillOptions(None)),
            {"kill": [{"run": "r1", "state": "asked to stop"}]},
            "no longer waiting, but r1 was asked to stop; `dflash status r1` tells",
        ),
        (lambda session: checkpoint(session, "r1", 5), {"checkpoint": []}, "nothing was changed"),
        (lambda session: checkpoint(session, "r1", 5), {"checkpoint": [{"run": "r1"}]}, "r1 was asked to save"),
        (
            lambda session: execute(session, "r1", ["true"], io.BytesIO(), io.BytesIO()),
            {"exec": []},
            "is ended with the connection",
        ),
    ],
)
def test_ctrl_c_says_what_was_done_and_what_not(
    verb: Callable[[Session], object], events: dict[str, Any], words: str
) -> None:
    session = Session(INVENTORY, "lab", Interrupted({name: [[*said, {}]] for name, said in events.items()}), quiet=True)
    with pytest.raises(KeyboardInterrupt):
        verb(session)
    assert words in session.so_far
