"""A launch says only what is true, and puts nothing of the user's where it shows."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dflash_ops.errors import DflashError
from dflash_ops.inventory.models import Inventory
from dflash_ops.plan.plan import LaunchOptions
from dflash_ops.transport.base import BadAnswer, ConnectionLost, RemoteRefusal, Unreachable
from dflash_ops.verbs.launch import launch
from tests.ops.jobs import CANARY, PREFLIGHT, planned, session, snapshot


def test_with_the_release_present_a_launch_is_two_round_trips(inventory: Inventory) -> None:
    opened, transport = session(
        inventory, launch=[[{"stage": "facts"}, {"reached": "started", "snapshot": snapshot()}]]
    )
    report = launch(opened, LaunchOptions("smoke", "r1"))
    assert (report.run, report.reached, report.invocation_id) == ("r1", "started", "ab12")
    assert report.round_trips == 2
    assert [call.verb for call in transport.calls] == ["preflight", "launch"]


def test_a_missing_release_is_sent_first(inventory: Inventory) -> None:
    opened, transport = session(
        inventory,
        preflight=[{**PREFLIGHT, "release": "missing"}],
        store=[{"state": "stored"}],
        launch=[{"reached": "started", "snapshot": snapshot()}],
    )
    assert launch(opened, LaunchOptions("smoke", "r1")).round_trips == 3
    store = transport.calls[1]
    assert store.verb == "store"
    assert store.request["name"] == planned(inventory).release.name


def test_hidden_files_that_are_left_out_are_named(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    (inventory.path.parent / "package/.env").write_text("x")
    opened, _ = session(inventory, launch=[[{"stage": "facts"}, {"reached": "started", "snapshot": snapshot()}]])
    opened.quiet = False
    launch(opened, LaunchOptions("smoke", "r1"))
    assert "left out of the release: .env (hidden; `include` of the job ships them)" in capsys.readouterr().err


def test_a_run_that_dies_within_the_wait_is_a_failure_with_its_last_lines(inventory: Inventory) -> None:
    ended = {
        "time": 1005.0,
        "result": "exit-code",
        "exit_code": "exited",
        "exit_status": "1",
        "invocation_id": "ab12",
        "boot_id": "b",
    }
    opened, _ = session(inventory, launch=[{"reached": "ended", "snapshot": snapshot(active="failed", exit=ended)}])
    with pytest.raises(DflashError) as caught:
        launch(opened, LaunchOptions("smoke", "r1"))
    assert caught.value.code == 100
    assert "exit 1" in caught.value.message
    assert "last" in caught.value.lines[-1]
    assert "\x1b" not in "".join(caught.value.lines)


@pytest.mark.parametrize(
    ("status", "asked", "code", "words"),
    [
        ("TERM", None, 104, "is lost"),
        ("TERM", {"time": 1004.0, "by": "ann@laptop", "grace": 45}, 103, "was cancelled: stopped by ann@laptop"),
    ],
)
def test_a_run_that_somebody_ended_within_the_wait_is_no_launch_that_went_well(
    inventory: Inventory, status: str, asked: dict[str, Any] | None, code: int, words: str
) -> None:
    ended = {"time": 1005.0, "result": "success", "exit_code": "killed", "exit_status": status}
    seen = snapshot(active="inactive", exit={**ended, "invocation_id": "ab12", "boot_id": "b"})
    seen["records"]["kill_requested"] = asked
    opened, _ = session(inventory, launch=[{"reached": "ended", "snapshot": seen}])
    with pytest.raises(DflashError, match=f"the run r1 {words}") as caught:
        launch(opened, LaunchOptions("smoke", "r1"))
    assert caught.value.code == code


def test_a_run_that_needs_longer_goes_on_and_is_said_to(inventory: Inventory) -> None:
    opened, _ = session(inventory, launch=[{"reached": "timeout", "snapshot": snapshot()}])
    with pytest.raises(DflashError, match="did not reach its first optimizer step within 3 s; it goes on") as caught:
        launch(opened, LaunchOptions("smoke", "r1", wait="step", timeout=3))
    assert caught.value.code == 75


def test_a_connection_that_breaks_while_waiting_says_that_the_run_may_go_on(inventory: Inventory) -> None:
    opened, _ = session(inventory, launch=[[{"stage": "start"}, ConnectionLost("the connection to pve1 broke")]])
    with pytest.raises(ConnectionLost) as caught:
        launch(opened, LaunchOptions("smoke", "r1"))
    assert "`dflash status r1`" in caught.value.hint
    opened, _ = session(inventory, launch=[Unreachable("container 200 on pve1 is stopped", "start it")])
    with pytest.raises(Unreachable) as stopped:
        launch(opened, LaunchOptions("smoke", "r1"))
    assert stopped.value.hint == "start it"


@pytest.mark.parametrize("answer", [{}, {"release": 1, "environment_missing": False}, {"release": "present"}])
def test_an_answer_of_the_wrong_form_is_refused(inventory: Inventory, answer: dict[str, Any]) -> None:
    opened, transport = session(inventory, preflight=[answer])
    with pytest.raises(BadAnswer):
        launch(opened, LaunchOptions("smoke", "r1"))
    assert [call.verb for call in transport.calls] == ["preflight"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "nothing was started"),
        ([{"stage": "facts"}], "nothing was started"),
        ([{"stage": "start"}], "r1 may have been started; `dflash status r1` tells"),
        ([{"stage": "start"}, {"stage": "started"}], "r1 goes on; `dflash status r1` looks, `dflash kill r1` ends it"),
    ],
)
def test_ctrl_c_says_whether_there_is_a_run(inventory: Inventory, events: list[Any], words: str) -> None:
    opened, _ = session(inventory, launch=[[*events, Unreachable("as a Ctrl-C would")]])
    with pytest.raises(Unreachable):
        launch(opened, LaunchOptions("smoke", "r1"))
    assert opened.so_far == words


def test_an_interpreter_that_is_not_there_is_cured_in_the_inventory_in_use(inventory: Inventory) -> None:
    missing = RemoteRefusal(78, "there is no /opt/venv/bin/python in the container", "look", reason="no-python")
    opened, _ = session(inventory, preflight=[missing])
    with pytest.raises(RemoteRefusal) as caught:
        launch(opened, LaunchOptions("smoke", "r1"))
    assert caught.value.hint == f"correct `python` of environment venv in {inventory.path}"


HELD = RemoteRefusal(75, "the run r0 holds GPU 5", "wait", reason="gpus-held:r0")


def test_held_gpus_refuse_the_launch(inventory: Inventory) -> None:
    opened, transport = session(inventory, launch=[HELD])
    with pytest.raises(RemoteRefusal, match="r0 holds GPU 5"):
        launch(opened, LaunchOptions("eight", "r1"))
    assert [call.verb for call in transport.calls] == ["preflight", "launch"]


def test_replace_stops_the_holder_and_starts_then(inventory: Inventory) -> None:
    stopped = {"outcome": "stopped", "gpu": None, "snapshot": snapshot("r0", "inactive")}
    opened, transport = session(
        inventory, launch=[HELD, {"reached": "started", "snapshot": snapshot()}], kill=[stopped]
    )
    launch(opened, LaunchOptions("eight", "r1", replace=True))
    assert [(call.verb, call.request.get("run")) for call in transport.calls[1:]] == [
        ("launch", "r1"),
        ("kill", "r0"),
        ("launch", "r1"),
    ]


def test_replace_does_not_touch_a_run_of_the_same_name(inventory: Inventory) -> None:
    opened, transport = session(inventory, launch=[RemoteRefusal(75, "the run r1 is already there", reason="taken")])
    with pytest.raises(RemoteRefusal, match="already there"):
        launch(opened, LaunchOptions("smoke", "r1", replace=True))
    assert "kill" not in [call.verb for call in transport.calls]


def test_an_unreachable_container_leaves_nothing_to_clean_up(inventory: Inventory) -> None:
    opened, transport = session(inventory, preflight=[Unreachable("container 200 on pve1 is stopped", "start it")])
    with pytest.raises(Unreachable):
        launch(opened, LaunchOptions("smoke", "r1"))
    assert [call.verb for call in transport.calls] == ["preflight"]


def test_secrets_cross_in_the_request_only(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    opened, transport = session(inventory, launch=[{"reached": "started", "snapshot": snapshot()}])
    opened.quiet = False
    report = launch(opened, LaunchOptions("smoke", "r1"))
    said = capsys.readouterr()
    assert CANARY not in said.out + said.err + report.model_dump_json()
    files = transport.calls[-1].request["files"]
    assert CANARY in files.pop("env")
    assert CANARY not in repr(transport.calls[-1].request)
    assert CANARY in os.environ["CANARY"]
