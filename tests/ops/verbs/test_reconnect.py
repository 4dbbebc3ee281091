"""A stream goes on over a new connection where the last one ended."""

from __future__ import annotations

from dflash_ops.verbs.status import watch
from tests.ops.container import ABSENT, Container, alive


def test_watch_stays_with_its_run_when_a_newer_one_starts_while_it_reconnects(container: Container) -> None:
    container.run("r1", alive())

    def newer() -> None:
        container.run("r2", alive())
        container.units["dflash-r1.service"] = ABSENT

    session = container.session(cuts=[1], meanwhile={1: newer}, polls=[lambda: None])
    assert {answer.run for answer in watch(session, None)} == {"r1"}
