"""`dflash status` asks once, watches over one connection, and says what was last known."""

from __future__ import annotations

import json
import os

import pytest

from dflash_ops.errors import Exit, UsageError
from dflash_ops.transport.base import Misconfigured, RemoteRefusal, Unreachable
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import status, watch
from tests.ops.container import ABSENT, Container, alive, ended
from tests.ops.evidence import INVENTORY


def test_status_of_the_newest_run_takes_one_round_trip(container: Container) -> None:
    container.run("old", ABSENT)
    os.utime(container.root / "runs/old/spec.json", (1, 1))
    container.run("new", alive())
    session = container.session()
    answer = status(session, None)
    assert (answer.run, answer.state, answer.exit_code) == ("new", "running", Exit.RUN_NOT_FINISHED)
    assert session.transport.round_trips == 1


def test_a_run_that_does_not_exist_is_not_found(container: Container) -> None:
    container.run("r1", alive())
    with pytest.raises(RemoteRefusal) as caught:
        status(container.session(), "r2")
    assert caught.value.code == Exit.RUN_NOT_FOUND


def test_a_name_that_is_no_run_name_goes_nowhere(container: Container) -> None:
    session = container.session()
    with pytest.raises(UsageError):
        status(session, "../../etc")
    assert session.transport.round_trips == 0


def test_an_unreachable_container_is_told_with_what_was_last_known(container: Container) -> None:
    container.run("r1", alive())
    status(container.session(), "r1")
    down = Session(INVENTORY, "lab", FakeTransport({"status": [Unreachable("node is down", "is it on?")]}))
    with pytest.raises(Unreachable) as caught:
        status(down, None)
    assert caught.value.hint == "is it on?; r1 was running when last seen, 0s ago"
    missing = Session(INVENTORY, "lab", FakeTransport({"status": [Misconfigured("no key file", "make one")]}))
    with pytest.raises(Misconfigured) as unset:
        status(missing, None)
    assert unset.value.hint == "make one"  # nothing was asked: what was seen before is no comfort


def test_watch_follows_over_one_connection_until_the_end(container: Container) -> None:
    folder = container.run("r1", alive())

    def end() -> None:
        container.units["dflash-r1.service"] = ABSENT
        (folder / "exit.json").write_text(json.dumps(ended("success", "exited", "0")))

    session = container.session(polls=[lambda: None, end])
    states = [answer.state for answer in watch(session, None)]
    assert states == ["running", "running", "succeeded"]
    assert session.transport.round_trips == 1
