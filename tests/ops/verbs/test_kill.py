"""`dflash kill` asks first, and says what became of the run."""

from __future__ import annotations

import pytest

from dflash_ops.errors import UsageError
from dflash_ops.inventory.models import Inventory
from dflash_ops.transport.base import (
    RemoteRefusal,
)
from dflash_ops.verbs.kill import KillOptions, kill, question
from dflash_ops.verbs.status import look
from tests.ops.container import Container, alive
from tests.ops.jobs import session, snapshot


def test_kill_looks_before_it_asks_and_names_the_run(container: Container) -> None:
    container.run("r1", alive())
    session = container.session()
    found = look(session, None)
    assert question(found) == "Stop r1 on lab (job smoke, step 3/20, launched by ann@laptop 1m ago)?"
    assert session.transport.round_trips == 1
    with pytest.raises(RemoteRefusal) as caught:
        look(session, "none")
    assert caught.value.code == 102


def test_a_kill_is_one_round_trip_and_says_what_became_of_the_run(inventory: Inventory) -> None:
    record = snapshot(active="inactive")
    record["records"]["kill_requested"] = {"time": 1004.0, "by": "ann@laptop", "grace": 45.0}
    record["records"]["exit"] = {
        "time": 1005.0,
        "result": "success",
        "exit_code": "exited",
        "exit_status": "0",
        "invocation_id": "ab12",
        "boot_id": "b",
    }
    answers = [
        {"run": "r1", "state": "asked to stop"},
        {"waited": 1},
        {"outcome": "stopped", "gpu": None, "snapshot": record},
    ]
    opened, transport = session(inventory, kill=[answers])
    report = kill(opened, KillOptions("r1", grace=5))
    assert (report.outcome, report.verdict.state) == ("stopped", "cancelled")
    assert transport.round_trips == 1
    assert transport.calls[0].request["grace"] == 5
    assert "ann@laptop" in report.verdict.reason


def test_kill_refuses_what_is_not_a_run_name_before_connecting(inventory: Inventory) -> None:
    opened, transport = session(inventory)
    with pytest.raises(UsageError):
        kill(opened, KillOptions("../r1"))
    assert transport.calls == []
