"""status, runs, wait and checkpoint on real run directories, with systemd's answers given by the test."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_ops.errors import Exit, UsageError
from dflash_ops.remote import channel, files, preflight, process, systemd
from dflash_ops.remote import checkpoint as remote_checkpoint
from dflash_ops.remote import kill as remote_stop
from dflash_ops.run.last_known import last_seen
from dflash_ops.run.status import Status
from dflash_ops.show import answers, tables
from dflash_ops.show import status as render
from dflash_ops.transport.base import BadAnswer, Frame, Misconfigured, Program, RemoteRefusal, Unreachable
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs import reconnect as live
from dflash_ops.verbs.checkpoint import checkpoint
from dflash_ops.verbs.exec import execute
from dflash_ops.verbs.kill import KillOptions, kill, question
from dflash_ops.verbs.runs import runs
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import look, status, watch
from dflash_ops.verbs.wait import WaitOptions, wait
from tests.ops.evidence import BOOT, INVENTORY, INVOCATION
from tests.ops.inprocess import InProcess

ABSENT = {"LoadState": "not-found", "ActiveState": "inactive", "Result": "success"}


WELL = {
    "time": 1.0,
    "result": "success",
    "exit_code": "exited",
    "exit_status": "0",
    "invocation_id": INVOCATION,
    "boot_id": BOOT,
}


def alive(pid: int = 1, **changes: str) -> dict[str, str]:
    given = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "InvocationID": INVOCATION}
    return {**given, "MainPID": str(pid), "StatusText": "step 3/20 loss 3.21", **changes}


class Container:
    """A root folder with runs, and what systemd says of each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units: dict[str, dict[str, str]] = {}

    def run(self, name: str, unit: dict[str, str], *, steps: int = 3, **records: dict[str, Any]) -> Path:
        folder = self.root / "runs" / name
        folder.mkdir(parents=True)
        (folder / "log").write_text(f"hello from {name}\n")
        spec = {
            "schema": 1,
            "run": name,
            "job": "smoke",
            "target": "lab",
            "created": time.time() - 60,
            "launched_by": "ann@laptop",
            "release": "a" * 32,
            "environment": "venv",
            "python": "/opt/venv/bin/python",
            "config": {},
            "gpus": {"target": [], "drafters": []},
        }
        started = {
            "time": time.time() - 59,
            "unit": f"dflash-{name}.service",
            "invocation_id": INVOCATION,
            "boot_id": BOOT,
            "main_pid": 1,
            "systemd_version": "252",
        }
        for kind, value in {"spec": spec, "started": started, **records}.items():
            (folder / f"{kind.replace('_', '-')}.json").write_text(json.dumps(value))
        self.write_steps(folder, steps)
        self.units[f"dflash-{name}.service"] = unit
        return folder

    def write_steps(self, folder: Path, steps: int) -> None:
        lines = [
            json.dumps({"kind": "step", "step": i + 1, "total_steps": 20, "time": time.time(), "loss": 4.0 - i / 10})
            for i in range(steps)
        ]
        if lines:
            (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def session(self, **options: Any) -> Session:
        return Session(INVENTORY, "lab", InProcess(self.root, **options), str(self.root), quiet=True)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    found = Container(tmp_path / "root")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(systemd, "boot_id", lambda: BOOT)
    monkeypatch.setattr(systemd, "show_units", lambda units, timeout=10: {unit: found.units[unit] for unit in units})
    monkeypatch.setattr(live.time, "sleep", lambda seconds: None)
    return found


def ended(result: str, code: str, status: str) -> dict[str, Any]:
    return {
        "time": time.time(),
        "result": result,
        "exit_code": code,
        "exit_status": status,
        "invocation_id": INVOCATION,
        "boot_id": BOOT,
    }


def shown(view: object) -> str:
    screen = Console(file=io.StringIO(), width=200, markup=False, highlight=False)
    screen.print(view)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


# ---- status ------------------------------------------------------------------------------------------------


def test_status_of_the_newest_run_takes_one_round_trip(container: Container) -> None:
    container.run("old", ABSENT)
    os.utime(container.root / "runs/old/spec.json", (1, 1))
    container.run("new", alive())
    session = container.session()
    answer = status(session, None)
    assert (answer.run, answer.state, answer.exit_code) == ("new", "running", Exit.RUN_NOT_FINISHED)
    assert session.transport.round_trips == 1


def test_the_json_document_is_versioned_and_writes_unknown_as_null(container: Container) -> None:
    container.run("r1", alive(), steps=0)
    document = json.loads(status(container.session(), "r1").model_dump_json())
    assert (document["schema"], document["kind"]) == (1, "status")
    assert document["progress"] is None
    assert document["unit"]["memory"] is None
    assert document["now"]["utc"].endswith("Z")


def test_status_shows_probes_progress_and_job(container: Container) -> None:
    container.run("r1", alive())
    text = shown(render.status_view(status(container.session(), "r1")))
    for part in ("r1  running", "unit  ✓", "log   ✓", "gpu   –", "3/20", "loss 3.800", "smoke on lab", "ann@laptop"):
        assert part in text


def test_status_of_a_failed_run_shows_the_end_of_its_log(container: Container) -> None:
    folder = container.run("r1", ABSENT, exit=ended("exit-code", "exited", "1"))
    (folder / "log").write_text("Traceback (most recent call last):\nValueError: \x1b[2J17 rows, 16 wanted\n")
    answer = status(container.session(), "r1")
    text = shown(render.status_view(answer))
    assert answer.exit_code == Exit.RUN_FAILED
    assert "│ ValueError: \\x1b[2J17 rows, 16 wanted" in text


HOSTILE = "\x1b]0;title\x07\x1b[2J"


def test_no_record_of_a_run_can_steer_the_terminal(container: Container) -> None:
    folder = container.run("r1", alive())
    spec = json.loads((folder / "spec.json").read_text())
    words = ("job", "target", "launched_by", "release", "environment", "python", "resumed_from")
    (folder / "spec.json").write_text(json.dumps({**spec, **dict.fromkeys(words, HOSTILE)}))
    text = shown(render.status_view(status(container.session(), "r1")))
    assert "\\x1b]0;title" in text
    assert not {"\x1b", "\x07"} & set(text)


@pytest.mark.parametrize(
    "change",
    [
        {"run": HOSTILE},
        {"run": "../r1"},
        {"checkpoints": [{"name": HOSTILE, "step": 1, "time": 1.0}]},
        {"time": float("inf")},
        {"time": float("nan")},
        {"time": 1e18},
    ],
)
def test_a_probe_that_answers_nonsense_is_refused_in_a_sentence(container: Container, change: dict[str, Any]) -> None:
    container.run("r1", alive())
    value = container.session().call("status", {"run": "r1"}).value
    session = Session(INVENTORY, "lab", FakeTransport({"status": [{**value, **change}]}), quiet=True)
    with pytest.raises(BadAnswer):
        status(session, "r1")


def test_a_record_with_an_impossible_time_or_a_giant_step_is_damage_and_not_a_crash(container: Container) -> None:
    folder = container.run("r1", alive())
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**spec, "created": 1e300}))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 10**400, "total_steps": 1}) + "\n")
    answer = status(container.session(), "r1")
    assert (answer.state, answer.unreadable, answer.progress) == ("running", ("spec.json",), None)
    assert "spec.json is damaged" in shown(render.status_view(answer))


def test_progress_that_the_container_words_cannot_steer_the_terminal(
    container: Container, capsys: pytest.CaptureFixture[str]
) -> None:
    Session(INVENTORY, "lab", FakeTransport({})).say(f"\n  waiting, {HOSTILE} s")
    assert capsys.readouterr().err == "\n  waiting, \\x1b]0;title\\x07\\x1b[2J s\n"


def test_a_damaged_record_does_not_hide_the_rest(container: Container) -> None:
    folder = container.run("r1", alive())
    (folder / "spec.json").write_text('{"run": ')
    answer = status(container.session(), "r1")
    assert (answer.state, answer.unreadable) == ("running", ("spec.json",))
    assert "spec.json is damaged" in shown(render.status_view(answer))


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


def test_kill_looks_before_it_asks_and_names_the_run(container: Container) -> None:
    container.run("r1", alive())
    session = container.session()
    found = look(session, None)
    assert question(found) == "Stop r1 on lab (job smoke, step 3/20, launched by ann@laptop 1m ago)?"
    assert session.transport.round_trips == 1
    with pytest.raises(RemoteRefusal) as caught:
        look(session, "none")
    assert caught.value.code == 102


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


def test_targets_of_one_name_in_two_inventories_are_not_mixed_up(container: Container, tmp_path: Path) -> None:
    container.run("r1", alive())
    status(container.session(), "r1")
    assert last_seen(INVENTORY.path, "lab", "r1") is not None
    assert last_seen(tmp_path / "inventory.yaml", "lab", "r1") is None


def test_an_answer_in_another_form_is_refused(container: Container) -> None:
    odd = Session(INVENTORY, "lab", FakeTransport({"status": [{"run": "r1", "time": "soon"}]}))
    with pytest.raises(BadAnswer):
        status(odd, "r1")


@pytest.mark.parametrize("damage", ["{}", '["x"]', "3", "{", "\xff"])
def test_a_damaged_memory_of_this_laptop_is_written_anew(container: Container, damage: str) -> None:
    container.run("r1", alive())
    status(container.session(), "r1")
    (kept,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.json")
    kept.write_bytes(damage.encode("latin-1"))
    assert last_seen(INVENTORY.path, "lab", "r1") is None
    status(container.session(), "r1")
    seen = last_seen(INVENTORY.path, "lab", "r1")
    assert seen is not None
    assert seen.state == "running"


def test_a_laptop_that_cannot_write_still_answers(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    container.run("r1", alive())
    assert status(container.session(), "r1").state == "running"
    assert last_seen(INVENTORY.path, "lab", None) is None


# ---- watch -------------------------------------------------------------------------------------------------


def test_watch_follows_over_one_connection_until_the_end(container: Container) -> None:
    folder = container.run("r1", alive())

    def end() -> None:
        container.units["dflash-r1.service"] = ABSENT
        (folder / "exit.json").write_text(json.dumps(ended("success", "exited", "0")))

    session = container.session(polls=[lambda: None, end])
    states = [answer.state for answer in watch(session, None)]
    assert states == ["running", "running", "succeeded"]
    assert session.transport.round_trips == 1


def test_watch_stays_with_its_run_when_a_newer_one_starts_while_it_reconnects(container: Container) -> None:
    container.run("r1", alive())

    def newer() -> None:
        container.run("r2", alive())
        container.units["dflash-r1.service"] = ABSENT

    session = container.session(cuts=[1], meanwhile={1: newer}, polls=[lambda: None])
    assert {answer.run for answer in watch(session, None)} == {"r1"}


# ---- runs --------------------------------------------------------------------------------------------------


def test_runs_lists_the_newest_first_with_verdicts(container: Container) -> None:
    container.run("a", ABSENT, exit=ended("success", "exited", "0"))
    os.utime(container.root / "runs/a/spec.json", (1, 1))
    container.run(
        "b", ABSENT, started={**json.loads((container.root / "runs/a/started.json").read_text()), "boot_id": "x"}
    )
    os.utime(container.root / "runs/b/spec.json", (2, 2))
    container.run("c", alive())
    session = container.session()
    answer = runs(session, 2)
    assert [(one.run, one.state) for one in answer.runs] == [("c", "running"), ("b", "lost")]
    assert (answer.total, session.transport.round_trips) == (3, 1)
    assert "restarted" in shown(tables.runs_table(answer))


# ---- wait --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "unit", "steps", "exit_", "code"),
    [
        ("started", alive(), 0, None, Exit.OK),
        ("step", alive(), 1, None, Exit.OK),
        ("finished", ABSENT, 3, ended("success", "exited", "0"), Exit.OK),
        ("step", ABSENT, 0, ended("exit-code", "exited", "1"), Exit.RUN_FAILED),
        ("finished", ABSENT, 3, ended("success", "killed", "TERM"), Exit.RUN_LOST),
    ],
)
def test_wait_ends_with_the_runs_state_as_exit_code(
    container: Container, goal: Any, unit: dict[str, str], steps: int, exit_: dict[str, Any] | None, code: Exit
) -> None:
    container.run("r1", unit, steps=steps, **({"exit": exit_} if exit_ else {}))
    assert wait(container.session(), WaitOptions("r1", goal)).exit_code == code


def test_wait_sees_the_first_step_come(container: Container) -> None:
    folder = container.run("r1", alive(), steps=0)
    session = container.session(polls=[lambda: None, lambda: container.write_steps(folder, 1)])
    answer = wait(session, WaitOptions("r1", "step"))
    assert (answer.reached, answer.status.state) == (True, "running")


def test_wait_gives_up_at_its_timeout_and_says_not_finished(container: Container) -> None:
    container.run("r1", alive())
    answer = wait(container.session(), WaitOptions("r1", "finished", timeout=0.0))
    assert (answer.reached, answer.exit_code) == (False, Exit.RUN_NOT_FINISHED)


def test_wait_says_the_end_once(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", ABSENT, exit=WELL)
    session = container.session()
    session.quiet = False
    answers.show_wait(wait(session, WaitOptions("r1")))
    seen = capsys.readouterr()
    assert (seen.out.count("succeeded"), seen.err) == (1, "")


def test_a_run_that_ended_has_no_time_left(container: Container) -> None:
    folder = container.run("r1", alive(), steps=3)
    steps = [{"kind": "step", "step": i, "total_steps": 20, "time": 1000.0 + 60 * i} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert " left" in shown(render.status_view(status(container.session(), "r1")))
    (folder / "exit.json").write_text(json.dumps({**WELL, "result": "signal", "exit_code": "killed"}))
    container.units["dflash-r1.service"] = ABSENT
    assert " left" not in shown(render.status_view(status(container.session(), "r1")))


def test_piped_answers_end_where_their_text_does(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", alive())
    render.show_status(status(container.session(), "r1"))
    tables.show_runs(runs(container.session(), 5))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_long_reason_is_one_line_of_the_table(container: Container) -> None:
    reason = "FileNotFoundError: /srv/" + "very-long-folder/" * 30
    container.run("r1", ABSENT, exit={**WELL, "result": "exit-code", "exit_status": "1"})
    (container.root / "runs/r1/log").write_text(f"2026-11-30T07:20:00.123Z ERROR main {reason}\n")
    answer = runs(container.session(), 5)
    assert len(answer.runs[0].reason) > 100
    stream = io.StringIO()
    Console(file=stream, width=100).print(tables.runs_table(answer))
    assert len(stream.getvalue().splitlines()) == 2


# ---- checkpoint --------------------------------------------------------------------------------------------

TRAINER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1]) / "checkpoints" / "step-00000007"
def save(*_):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
if sys.argv[2] == "listens":
    signal.signal(signal.SIGUSR2, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def trainer() -> Iterator[Callable[[Path, str], int]]:
    children: list[subprocess.Popen[str]] = []

    def start(folder: Path, manner: str) -> int:
        argv = [sys.executable, "-c", TRAINER, str(folder), manner]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child.pid

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_checkpoint_returns_when_the_manifest_is_there(
    container: Container, trainer: Callable[[Path, str], int]
) -> None:
    folder = container.run("r1", alive())
    container.units["dflash-r1.service"] = alive(trainer(folder, "listens"))
    answer = checkpoint(container.session(), "r1", 20)
    assert answer.checkpoint.name == "step-00000007"


def test_a_trainer_that_would_die_of_the_signal_is_not_sent_it(
    container: Container, trainer: Callable[[Path, str], int]
) -> None:
    folder = container.run("r1", alive())
    pid = trainer(folder, "is deaf")
    container.units["dflash-r1.service"] = alive(pid)
    with pytest.raises(RemoteRefusal, match="does not take requests yet") as caught:
        checkpoint(container.session(), "r1", 20)
    assert caught.value.code == Exit.TEMPORARY
    os.kill(pid, 0)


def test_another_incarnation_of_the_unit_is_not_sent_the_signal(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    container.run("r1", alive(InvocationID="f" * 32))
    monkeypatch.setattr(remote_checkpoint.os, "kill", lambda pid, number: pytest.fail("a signal was sent"))
    with pytest.raises(RemoteRefusal, match="started again"):
        checkpoint(container.session(), "r1", 20)


@pytest.mark.parametrize(
    ("records", "code", "words"),
    [
        ({}, Exit.RUN_LOST, "lost, systemd no longer knows the unit"),
        ({"kill_requested": {"time": 1.0, "by": "ann@laptop", "grace": 45}, "exit": WELL}, Exit.RUN_CANCELLED, "ann"),
        ({"exit": {**WELL, "result": "exit-code", "exit_status": "1"}}, Exit.RUN_FAILED, "failed, exit 1"),
        ({"exit": WELL}, Exit.USAGE, "succeeded"),
    ],
)
def test_a_run_that_ended_is_not_asked_and_said_to_be_what_it_is(
    container: Container, records: dict[str, Any], code: Exit, words: str
) -> None:
    container.run("r1", ABSENT, **records)
    with pytest.raises(RemoteRefusal, match="the run r1 is not running: ") as caught:
        checkpoint(container.session(), "r1", 20)
    assert (caught.value.code, words in caught.value.message) == (code, True)
    assert caught.value.hint == "`dflash status r1` says how it is"


def test_cpu_use_is_given_only_when_it_could_be_measured(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", threading.Event().wait)  # for real
    container.run("r1", alive(os.getpid()))
    assert status(container.session(), "r1").cpu is None
    os.utime(container.root / "runs/r1/log", (time.time() - 60,) * 2)
    cpu = status(container.session(), "r1").cpu
    assert cpu is not None
    assert cpu.over >= 1


# ---- launch --------------------------------------------------------------------------------------------------


def test_a_name_that_was_used_is_refused_before_anything_is_sent(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "systemd_version", lambda: 252)
    request = {"run": "r1", "gpus": [], "release": "a" * 32, "python": sys.executable, "locked": False}
    for unit, state in ((ABSENT, "ended"), (alive(), "active")):
        if not (container.root / "runs/r1").exists():
            container.run("r1", unit)
        container.units["dflash-r1.service"] = unit
        with pytest.raises(RemoteRefusal, match=rf"r1 is already there \({state}\)") as caught:
            container.session().call("preflight", request)
        assert (caught.value.code, caught.value.reason) == (Exit.USAGE, "taken")
    assert container.session().call("preflight", {**request, "run": "r2"}).value["release"] == "missing"


# ---- kill --------------------------------------------------------------------------------------------------


def test_a_kill_waits_for_a_launch_that_is_under_way(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = container.run("r1", ABSENT)
    (folder / "started.json").unlink()
    stopped = []

    @contextlib.contextmanager
    def locked(path: str, seconds: float) -> Iterator[None]:
        assert path == str(container.root / "launch.lock")
        container.units["dflash-r1.service"] = alive()  # the launch got through before it let go of its lock
        yield

    def systemctl(*words: str) -> None:
        stopped.append(words)
        container.units["dflash-r1.service"] = ABSENT

    monkeypatch.setattr(files, "locked", locked)
    monkeypatch.setattr(remote_stop, "_systemctl", systemctl)
    assert kill(container.session(), KillOptions("r1")).outcome == "stopped"
    assert stopped


def test_a_run_that_dies_before_it_is_asked_to_stop_keeps_its_reason(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())

    def slow_nvidia_smi(*_: Any) -> None:
        (folder / "exit.json").write_text(json.dumps(ended("exit-code", "exited", "1")))
        container.units["dflash-r1.service"] = {"LoadState": "loaded", "ActiveState": "failed", "Result": "exit-code"}

    monkeypatch.setattr(remote_stop, "_gpu_memory", slow_nvidia_smi)
    monkeypatch.setattr(remote_stop, "_systemctl", lambda *words: pytest.fail("it was asked to stop"))
    answer = kill(container.session(), KillOptions("r1"))
    assert (answer.outcome, answer.verdict.state) == ("already-ended", "failed")
    assert not (folder / "kill-requested.json").exists()


def end_by_itself(container: Container, folder: Path, code: str, status: str, after: float) -> None:
    record = ended("success" if status == "0" else "exit-code", code, status)
    (folder / "exit.json").write_text(json.dumps({**record, "time": time.time() + after}))
    container.units["dflash-r1.service"] = ABSENT


def test_a_stop_that_systemd_refuses_leaves_no_trace_in_the_verdict(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())
    refused = process.Completed(1, "", "Failed to stop: Transaction is destructive.\n", "")
    monkeypatch.setattr(process, "call", lambda *_, **__: refused)
    with pytest.raises(RemoteRefusal, match="did not stop the run r1: Failed to stop") as caught:
        kill(container.session(), KillOptions("r1"))
    assert "systemctl status" in caught.value.hint
    assert status(container.session(), "r1").verdict.state == "running"
    end_by_itself(container, folder, "killed", "KILL", after=10)
    assert status(container.session(), "r1").verdict.state == "failed"


def test_a_stop_for_a_unit_that_just_ended_leaves_its_reason(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())

    def call(*_: Any, **__: Any) -> process.Completed:
        end_by_itself(container, folder, "exited", "1", after=0)
        return process.Completed(5, "", "Failed to stop: Unit not loaded.\n", "")

    monkeypatch.setattr(process, "call", call)
    answer = kill(container.session(), KillOptions("r1", force=True))
    assert (answer.outcome, answer.verdict.state) == ("already-ended", "failed")


@pytest.mark.parametrize("grace", [45, 600])
def test_a_kill_that_dies_before_systemd_is_asked_does_not_claim_a_later_end(
    container: Container, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    folder = container.run("r1", alive())
    with monkeypatch.context() as patch:
        patch.setattr(remote_stop, "_systemctl", lambda *_: (_ for _ in ()).throw(channel.PeerGone))
        with pytest.raises(Unreachable):
            kill(container.session(), KillOptions("r1", grace=grace))
    assert json.loads((folder / "kill-requested.json").read_text())["sent"] is False
    end_by_itself(container, folder, "exited", "0", after=3600)
    assert status(container.session(), "r1").verdict.state == "succeeded"


def test_the_next_kill_is_the_one_that_counts_when_the_first_never_came_through(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = container.run("r1", alive())
    lost = {"time": 1.0, "by": "bob@elsewhere", "grace": 45.0, "force": False, "sent": False}
    (folder / "kill-requested.json").write_text(json.dumps(lost))

    monkeypatch.setattr(
        remote_stop, "_systemctl", lambda *words: end_by_itself(container, folder, "exited", "0", after=0)
    )
    answer = kill(container.session(), KillOptions("r1"))
    assert (answer.outcome, answer.verdict.state) == ("stopped", "cancelled")
    assert "bob" not in answer.verdict.reason


# ---- drawing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([None, float("nan")], ""),
        ([1.0], "▄"),
        ([2.0, 2.0, 2.0], "▄▄▄"),
        ([0.0, 1.0], "▁█"),
        ([0.0, None, 7.0], "▁█"),
        ([float(i) for i in range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_sparkline_spans_from_the_smallest_to_the_largest(values: list[float | None], bars: str) -> None:
    assert render.sparkline(values) == bars


def test_a_long_series_is_drawn_in_the_width_that_there_is() -> None:
    assert len(render.sparkline([float(i) for i in range(1000)], 24)) == 24


@pytest.mark.parametrize(("value", "text"), [(940, "940"), (4321, "4.3k"), (123_456, "123k"), (1.2e6, "1.2M")])
def test_counts_are_short(value: float, text: str) -> None:
    assert render.count(value) == text


def test_the_watch_view_ends_with_the_last_status(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", alive())
    answer: Status = status(container.session(), "r1")
    assert render.show_watch(iter([answer])) is answer
    assert "r1  running" in capsys.readouterr().out


def test_the_workers_and_the_bottleneck_are_shown_as_the_trainer_reports_them(container: Container) -> None:
    folder = container.run("r1", alive())
    workers = {
        "target 0": {"busy": 0.98, "rows": 3},
        "drafter 0": {"busy": 0.44},
        "balance": {"bottleneck": "targets"},
        "queues": {"rows": 0.2},
    }
    record = {"kind": "step", "step": 4, "total_steps": 20, "time": time.time(), "loss": 3.0, "workers": workers}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    text = shown(render.status_view(status(container.session(), "r1")))
    assert "target 0 98%, drafter 0 44%; bottleneck: targets" in text
