"""A launch is planned without a connection, says only what is true, and puts nothing of the user's where it shows."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.errors import ConfigurationError, DflashError, UsageError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import Inventory, JobEntry
from dflash_ops.plan.config import dump_yaml, job_config, parse_value
from dflash_ops.plan.plan import LaunchOptions, Plan, automatic_name, needs_gpus, plan
from dflash_ops.plan.variables import resolve_variables
from dflash_ops.remote import preflight
from dflash_ops.remote.channel import Refusal
from dflash_ops.run.record import RUN_NAME, RootPaths
from dflash_ops.transport.base import BadAnswer, ConnectionLost, RemoteRefusal, Unreachable
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.kill import KillOptions, kill
from dflash_ops.verbs.launch import execute, launch
from dflash_ops.verbs.session import Session

CANARY = "s3cr3t-canary-$HOME"
INVENTORY = """\
targets:
  here: {host: local}
environments:
  venv: {python: /opt/venv/bin/python}
jobs:
  smoke:
    config: {optimizer: {lr: 0.001}, pipeline: {targets: [cpu], drafters: [cpu]}}
    source: package
    set: {optimizer.name: muon}
    env: {TOKEN: env:CANARY, PLAIN: "1", FROM_FILE: "file:@folder@/token"}
  eight:
    config: base.yaml
    source: package
    gpus: {target: 0-4, drafters: 5-7}
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("")
    (tmp_path / "token").write_text("of a file\n")
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 0.002}\n")
    (tmp_path / "inventory.yaml").write_text(INVENTORY.replace("@folder@", str(tmp_path)))
    monkeypatch.setenv("CANARY", CANARY)
    return load_inventory(tmp_path / "inventory.yaml")


def planned(inventory: Inventory, *changes: str, job: str = "smoke", run: str | None = "r1") -> Plan:
    return plan(inventory, "here", RootPaths("/var/lib/dflash"), LaunchOptions(job, run, changes))


def snapshot(run: str = "r1", active: str = "active", exit: dict[str, Any] | None = None) -> dict[str, Any]:
    started = {
        "time": 1000.0,
        "unit": f"dflash-{run}.service",
        "invocation_id": "ab12",
        "boot_id": "b",
        "main_pid": 7,
        "systemd_version": "252",
    }
    properties = {"LoadState": "loaded", "ActiveState": active, "SubState": "running", "InvocationID": "ab12"}
    return {
        "run": run,
        "time": 1010.0,
        "monotonic": 50.0,
        "boot_id": "b",
        "age": 10.0,
        "unit": {"kind": "shown", "properties": properties},
        "records": {"spec": None, "started": started, "exit": exit, "kill_requested": None, "unreadable": []},
        "log": {"kind": "file", "size": 10, "inode": 1, "mtime": 1009.0, "lines": ["first", "last \x1b[2J words"]},
        "disk": None,
        "metrics": {"mtime": None, "steps": [], "last": None},
        "checkpoints": [],
        "gpu": None,
        "cpu": None,
    }


PREFLIGHT = {"release": "present", "python": "3.11.2", "environment_missing": False}


def session(inventory: Inventory, **script: list[Any]) -> tuple[Session, FakeTransport]:
    transport = FakeTransport({"preflight": [PREFLIGHT], **script})
    return Session(inventory, "here", transport, quiet=True), transport


# ---- planning ----------------------------------------------------------------------------------------------


def test_the_last_word_on_a_key_wins(inventory: Inventory) -> None:
    assert planned(inventory).config["optimizer"] == {"lr": 0.001, "name": "muon"}
    asked = planned(inventory, "optimizer.name=adamw", "optimizer.lr=1e-4", "data.new.key=[1, 'x y']")
    assert asked.config["optimizer"] == {"lr": 1e-4, "name": "adamw"}
    assert asked.config["data"] == {"new": {"key": [1, "x y"]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("-2.5", -2.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("a b", "a b"),
        ("'1'", "1"),
        ('"x\\ny"', "x\ny"),
        ("[cuda:0, cuda:1]", ["cuda:0", "cuda:1"]),
        ("/srv/a b/日.jsonl", "/srv/a b/日.jsonl"),
        ("a=b", "a=b"),
    ],
)
def test_values_are_read_as_yaml(text: str, value: object) -> None:
    assert parse_value(text, "key") == value


@pytest.mark.parametrize(
    "change",
    [
        "novalue",
        "=1",
        "a..b=1",
        ".a=1",
        "optimizer.lr.x=1",
        "a=[",
        "a='",
        "a=!!python/x y",
        "a=2026-11-30",
        "a={1: x}",
        "a=&a [*a]",
        "a\udcff=1",
    ],
)
def test_a_change_that_cannot_be_made_is_a_usage_error(inventory: Inventory, change: str) -> None:
    with pytest.raises(UsageError):
        planned(inventory, change)


@pytest.mark.parametrize("config", ["{a: {b: [2026-11-30]}}", "{a: !!set {x}}", "{on: 1}"])
def test_what_yaml_has_and_a_configuration_has_not_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "inventory.yaml").write_text(f"targets: {{}}\njobs: {{j: {{config: {config}}}}}\n")
    inventory = load_inventory(tmp_path / "inventory.yaml")
    with pytest.raises(ConfigurationError, match="the configuration of job j cannot hold"):
        job_config(inventory, *inventory.job("j"), ())


def test_a_variable_that_is_no_text_is_named_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t\udcff")
    with pytest.raises(ConfigurationError, match="variable A of job j is not UTF-8 text") as caught:
        resolve_variables("j", JobEntry(config={}, env={"A": "env:TOKEN"}))
    assert "s3cr3t" not in str(caught.value)


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(blacklist_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
def test_a_configuration_arrives_as_the_values_it_was(value: object) -> None:
    assert yaml.safe_load(dump_yaml({"key": value})) == {"key": value}


def test_gpus_of_the_job_become_the_pipeline_s_devices_and_the_spec_s_roles(inventory: Inventory) -> None:
    asked = planned(inventory, job="eight")
    assert asked.config["pipeline"]["targets"] == [f"cuda:{index}" for index in range(5)]
    assert asked.config["pipeline"]["drafters"] == ["cuda:5", "cuda:6", "cuda:7"]
    assert asked.spec["gpus"] == {"target": [0, 1, 2, 3, 4], "drafters": [5, 6, 7]}
    fewer = planned(inventory, "pipeline.drafters=[cuda:5]", job="eight")
    assert fewer.spec["gpus"]["drafters"] == [5]


def test_a_run_on_cpu_holds_no_gpu(inventory: Inventory) -> None:
    assert planned(inventory).spec["gpus"] == {"target": [], "drafters": []}


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a b", "a/b", "..", "a\n", "é", "a" * 64, "a;b", "$x"])
def test_what_is_not_a_run_name_is_refused(inventory: Inventory, name: str) -> None:
    with pytest.raises(UsageError, match="not a run name"):
        planned(inventory, run=name)


@given(job=st.text(max_size=80))
def test_automatic_names_are_run_names(job: str) -> None:
    assert RUN_NAME.match(automatic_name(job))


def test_a_job_runs_only_where_it_may(inventory: Inventory) -> None:
    text = INVENTORY.replace("here: {host: local}", "here: {host: local}\n  there: {host: local}")
    inventory.path.write_text(text.replace("  smoke:\n", "  smoke:\n    targets: [there]\n"))
    with pytest.raises(UsageError, match="the job smoke may not run on here") as caught:
        planned(load_inventory(inventory.path))
    assert "--target there" in caught.value.hint
    assert planned(load_inventory(inventory.path), job="eight").spec["target"] == "here"


def test_secrets_are_in_the_variables_file_and_nowhere_else(inventory: Inventory) -> None:
    asked = planned(inventory)
    assert "TOKEN='s3cr3t-canary-$HOME'\n" in asked.env
    assert "FROM_FILE='of a file'\n" in asked.env
    assert asked.spec["variables"] == ["FROM_FILE", "PLAIN", "TOKEN"]
    elsewhere = repr((asked.spec, asked.argv, asked.entry, asked.on_exit, asked.config, asked))
    assert CANARY not in elsewhere
    assert "of a file" not in elsewhere


def test_a_secret_that_is_missing_is_named_not_guessed(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANARY")
    with pytest.raises(ConfigurationError, match="the variable CANARY"):
        planned(inventory)
    monkeypatch.setenv("CANARY", CANARY)
    (inventory.path.parent / "token").unlink()
    with pytest.raises(ConfigurationError, match="needs the file"):
        planned(inventory)


def test_a_configuration_file_that_is_broken_is_named_with_its_line(inventory: Inventory) -> None:
    (inventory.path.parent / "base.yaml").write_text("a: 1\nb: [\n")
    with pytest.raises(ConfigurationError, match=r"base\.yaml:3"):
        planned(inventory, job="eight")


# ---- launching ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("nodes", "held", "said"),
    [
        ([], [0], "the run wants GPU 0 and the container has none"),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], [0], "has none"),
        (["/dev/nvidia3"], [0, 1], "the run wants GPU 0, 1 and the container has 1"),
        (["/dev/nvidia0", "/dev/nvidia1"], [1], ""),
        ([], [], ""),
    ],
)
def test_gpus_that_are_not_there_refuse_the_launch(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], held: list[int], said: str
) -> None:
    monkeypatch.setattr(preflight.glob, "glob", lambda pattern: nodes)
    if not said:
        preflight._refuse_missing_gpus(held)
        return
    with pytest.raises(Refusal, match=said) as caught:
        preflight._refuse_missing_gpus(held)
    assert caught.value.code == 78
    assert "dflash doctor" in caught.value.hint


def test_only_our_own_trainer_s_numbers_are_those_of_gpus(inventory: Inventory) -> None:
    assert not planned(inventory, job="eight").needs_gpus  # it has a source of its own
    opened, transport = session(inventory, launch=[{"reached": "started", "snapshot": snapshot()}])
    launch(opened, LaunchOptions("eight", "r1"))
    assert transport.calls[0].request["gpus"] == []
    opened, transport = session(inventory, launch=[{"reached": "started", "snapshot": snapshot()}])
    execute(opened, replace(planned(inventory, job="eight"), needs_gpus=True))
    assert transport.calls[0].request["gpus"] == list(range(8))
    assert needs_gpus(JobEntry(config={}))
    assert not needs_gpus(JobEntry(config={}, env={"CUDA_VISIBLE_DEVICES": "3"}))


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


# ---- killing -----------------------------------------------------------------------------------------------


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
