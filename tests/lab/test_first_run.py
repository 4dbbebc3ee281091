"""Tests launch, status, tail-logs and kill against a real node, when things go well and when not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.lab import faults
from tests.lab.lab import Lab, wait_for
from tests.lab.user import STAND_IN, Dflash

pytestmark = pytest.mark.lab

EVERY_BYTE = ("python3", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)")


# ---- the main job -----------------------------------------------------------------------------------------------


def test_launch_status_tail_logs_kill(dflash: Dflash) -> None:
    dflash.job(config={"steps": None})
    dflash.inventory["default_job"] = "job"
    launched = dflash.json("launch", "--wait", "step")
    run = launched["run"]
    assert launched["reached"] == "step"
    assert launched["round_trips"] <= 3

    status = dflash.json("status")
    assert (status["run"], status["state"], status["unit"]["kind"]) == (run, "running", "running")
    assert status["gpu"]["kind"] == "none"  # no nvidia-smi in the container, and still judged running
    assert status["progress"]["last"]["step"] >= 1

    log = dflash("tail-logs", "--no-follow", "-n", "1000").stdout
    assert f"hello from {run}" in log

    killed = dflash.json("kill", "-y")
    assert killed["outcome"] == "stopped"
    assert dflash.json("status", "--exit-code", code=103)["state"] == "cancelled"
    assert dflash.lab.container("ls", f"{dflash.root}/runs/{run}/checkpoints").stdout.startswith("step-")
    assert dflash.json("kill", "-y")["outcome"] == "already-ended"


def test_a_run_that_does_all_its_steps_has_succeeded(dflash: Dflash) -> None:
    dflash.launch("short", steps=3)
    status = dflash.wait_state("short", "succeeded")
    assert dflash("status", "short", "--exit-code").returncode == 0
    assert status["checkpoint"]["name"] == "step-00000003"
    assert "done at step 3" in dflash("tail-logs", "short").stdout  # follows to the end, which is already there


def test_an_ignored_sigterm_is_followed_by_sigkill(dflash: Dflash) -> None:
    dflash.launch("stubborn", ignore_term=True)
    killed = dflash.json("kill", "stubborn", "-y", "--grace", "1")
    assert killed["outcome"] == "killed"
    assert dflash.state("stubborn") == "cancelled"


def test_launching_again_sends_no_release(dflash: Dflash) -> None:
    dflash.launch("first", steps=1)
    dflash.job(config={"steps": 1})
    second = dflash("launch", "job", "--run", "second")
    assert "sending release" not in second.stderr


def test_a_run_name_is_used_once(dflash: Dflash) -> None:
    dflash.launch("once")
    dflash("launch", "job", "--run", "once", code=2)
    assert dflash.state("once") == "running"


# ---- the run survives -------------------------------------------------------------------------------------------


def invocation(dflash: Dflash, run: str) -> str:
    return str(json.loads(dflash.run_file(run, "started.json"))["invocation_id"])


def test_a_run_survives_sshd_and_every_connection(lab: Lab, dflash: Dflash) -> None:
    dflash.launch("lasting")
    identity = invocation(dflash, "lasting")
    follower = dflash.start("tail-logs", "lasting")
    assert follower.stdout is not None
    assert follower.stdout.readline()
    lab.stop_sshd(sessions=True)
    try:
        dflash("status", "lasting", code=69)
    finally:
        lab.start_sshd()
    assert dflash.state("lasting") == "running"
    assert invocation(dflash, "lasting") == identity
    follower.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launch_that_is_killed_while_it_waits_leaves_one_run(dflash: Dflash, how: signal.Signals) -> None:
    dflash.job(config={"steps": None, "pause": 60})
    launching = dflash.start("launch", "job", "--run", "orphan", "--wait", "step", "--timeout", "100")
    wait_for("the unit runs", lambda: unit_state(dflash, "orphan") == "active", 60)
    launching.send_signal(how)
    launching.wait(30)
    status = dflash.wait_state("orphan", "running")
    assert status["unit"]["kind"] == "running"
    dflash("launch", "job", "--run", "orphan", code=2)


@pytest.mark.parametrize("enter", ["pct", "lxc-attach"])
def test_bytes_of_every_kind_come_through_each_way_in(dflash: Dflash, enter: str) -> None:
    dflash.inventory["containers"]["ct200"]["enter"] = enter
    dflash.launch("r1")
    assert dflash.exec("r1", *EVERY_BYTE) == bytes(range(256)) * 1000


def unit_state(dflash: Dflash, run: str) -> str:
    return dflash.lab.container("systemctl", "is-active", f"dflash-{run}.service", check=False).stdout.strip()


def test_a_launch_whose_connection_is_cut_says_so_and_the_run_goes_on(lab: Lab, dflash: Dflash) -> None:
    dflash.job(config={"steps": None, "pause": 60})
    launching = dflash.start("launch", "job", "--run", "cut", "--wait", "step", "--timeout", "100")
    wait_for("the unit runs", lambda: unit_state(dflash, "cut") == "active", 60)
    lab.stop_sshd(sessions=True)
    lab.start_sshd()
    _, err = launching.communicate(timeout=90)
    assert launching.returncode in (69, 75), err
    assert dflash.state("cut") == "running"


# ---- a trainer that dies ----------------------------------------------------------------------------------------

DEATHS = [
    ({"die": "import"}, "import error", "No module named 'no_such_module'"),
    ({"die": "first-step"}, "out of memory", "CUDA out of memory"),
    ({"die": "kill"}, "KILL", "hello from"),
    ({"die": "exit", "steps": 1, "code": 42}, "42", "this is the end"),
]


@pytest.mark.parametrize(("config", "reason", "line"), DEATHS)
def test_launch_reports_a_trainer_that_dies_within_its_wait(
    dflash: Dflash, config: dict[str, Any], reason: str, line: str
) -> None:
    wait = "started" if config["die"] == "import" else "step"
    dflash.job(config=config)
    failed = dflash("launch", "job", "--run", "dying", "--wait", wait, code=None)
    if failed.returncode == 0:  # its first step came before its death
        assert config["die"] in ("kill", "exit")
    else:
        assert failed.returncode == 100
        assert reason in failed.stderr
        assert line in failed.stderr
    status = dflash.wait_state("dying", "failed")
    assert reason in status["reason"]
    assert any(line in entry for entry in status["log"]["lines"])
    assert dflash("status", "dying", "--exit-code", code=100)


def test_a_trainer_that_is_killed_later_is_failed_and_not_lost(dflash: Dflash) -> None:
    dflash.launch("victim")
    dflash.lab.container("systemctl", "kill", "-s", "KILL", "dflash-victim.service")
    status = dflash.wait_state("victim", "failed")
    assert "KILL" in status["reason"]


# ---- the three probes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_silent_runs_are_told_apart_by_what_they_use(lab: Lab, dflash: Dflash) -> None:
    # Silence shows only after two minutes; a log that is older than its process is a clock that jumped. One minute
    # of life and a log set back by two serve all three runs.
    for run in ("sleeper", "worker", "nolog"):
        dflash.launch(run, "--wait", "step", hang_at=1, busy=run == "worker")
    time.sleep(65)
    for run in ("sleeper", "worker", "nolog"):
        for name in ("log", "metrics.jsonl"):
            lab.container("touch", "-d", "-122 seconds", f"{dflash.root}/runs/{run}/{name}")
    lab.container("rm", f"{dflash.root}/runs/nolog/log")
    found = {run: dflash.json("status", run) for run in ("sleeper", "worker", "nolog")}
    assert {run: (status["unit"]["kind"], status["log"]["kind"], status["state"]) for run, status in found.items()} == {
        "sleeper": ("running", "silent", "stalled"),
        "worker": ("running", "silent", "busy-quiet"),
        "nolog": ("running", "gone", "stalled"),
    }
    assert "no log line for 2m" in found["sleeper"]["reason"]


def test_a_deleted_log_is_seen_and_the_run_is_not_called_dead(dflash: Dflash) -> None:
    dflash.launch("nolog")
    dflash.lab.container("rm", f"{dflash.root}/runs/nolog/log")
    status = dflash.json("status", "nolog")
    assert (status["unit"]["kind"], status["log"]["kind"]) == ("running", "gone")
    assert status["state"] == "running"
    assert "log is gone" in status["reason"]


def test_a_run_that_vanished_with_its_container_is_lost(lab: Lab, dflash: Dflash) -> None:
    dflash.launch("lost")
    lab.restart_container()
    status = dflash.json("status", "lost", "--exit-code", code=104)
    assert status["state"] == "lost"
    assert "restarted" in status["reason"]


def test_a_run_in_a_container_that_was_shut_down_has_not_succeeded(lab: Lab, dflash: Dflash) -> None:
    dflash.launch("shut")
    lab.node("pct", "shutdown", "200")
    lab.start_container()
    assert dflash.state("shut") == "lost"


# ---- what is typed arrives, or is refused by name ---------------------------------------------------------------

VALUES = [
    "two words", "it's", 'a "quote"', "$HOME", "${PATH}", "$$", "%n %i %%", "`id`", "$(id)", "line\nbreak", "tab\there",
    "é 日本 🚀", "back\\slash", "; rm -rf /", "=ls", "~root", "*", "--flag", "",
]  # fmt: skip


def seen(dflash: Dflash, run: str) -> dict[str, Any]:
    return dict(json.loads(dflash.run_file(run, "seen.json")))


def test_configuration_values_arrive_unchanged(dflash: Dflash) -> None:
    dflash.job(config={"steps": 1, "values": VALUES, "a key with $ and é": "x"})
    words = [word for number, value in enumerate(VALUES) for word in ("--set", f"given.v{number}={json.dumps(value)}")]
    dflash("launch", "job", "--run", "values", *words)
    config = seen(dflash, "values")["config"]
    assert config["values"] == VALUES
    assert config["a key with $ and é"] == "x"
    assert config["given"] == {f"v{number}": value for number, value in enumerate(VALUES)}


def test_variables_arrive_unchanged(dflash: Dflash) -> None:
    dflash.job(env={f"V{number}": value for number, value in enumerate(VALUES)}, config={"steps": 1})
    dflash("launch", "job", "--run", "variables")
    environment = seen(dflash, "variables")["environment"]
    assert [environment[f"V{number}"] for number in range(len(VALUES))] == VALUES


@pytest.mark.parametrize(
    "name", ["two words", "Upper", "semi;colon", "$(id)", "../up", "a/b", "é", "-x", "", "a" * 64, "new\nline"]
)
def test_a_bad_run_name_is_refused_by_name(dflash: Dflash, name: str) -> None:
    dflash.job()
    refused = dflash("launch", "job", f"--run={name}", code=2)
    assert "is not a run name" in refused.stderr
    assert dflash.runs() == []


@pytest.mark.parametrize("folder", ["with space", "it's", "$HOME", "é🚀", "per%cent"])
def test_the_source_may_lie_anywhere(dflash: Dflash, folder: str) -> None:
    source = dflash.folder / folder / "trainer"
    shutil.copytree(STAND_IN, source)
    (source / f"{folder}.txt").write_text(folder)
    dflash.job(source=str(source), config={"steps": 1})
    dflash("launch", "job", "--run", "anywhere")
    release = json.loads(dflash.run_file("anywhere", "spec.json"))["release"]
    assert dflash.lab.container("cat", f"{dflash.root}/releases/{release}/trainer/{folder}.txt").stdout == folder


@pytest.mark.parametrize("shell", ["/usr/bin/zsh", "/usr/bin/fish", "noisy"])
def test_the_login_shell_changes_nothing(lab: Lab, dflash: Dflash, shell: str) -> None:
    with faults.login_shell(lab, shell):
        dflash.launch("shell", text="it's $HOME")
        assert dflash.state("shell") == "running"
        assert "it's $HOME" in dflash("tail-logs", "shell", "-n", "1000", "--no-follow").stdout
        assert dflash.json("kill", "shell", "-y")["outcome"] == "stopped"


# ---- one clear sentence each ------------------------------------------------------------------------------------


def refused(dflash: Dflash, code: int, *says: str, container: str = "ct200", verb: str = "launch") -> None:
    """The verb fails with this exit code, in one sentence with its cure, and leaves nothing of a run."""
    words = ["launch", "job", "--run", "none"] if verb == "launch" else [verb, "none"]
    failed = dflash(*words, "--container", container, code=code)
    [message] = [line for line in failed.stderr.splitlines() if line.startswith("dflash: ")]
    for part in says:
        assert part in failed.stderr
    assert len(message) < 300


def nothing_left(dflash: Dflash) -> None:
    assert "none" not in dflash.runs()
    assert unit_state(dflash, "none") == "inactive"


@pytest.mark.parametrize("verb", ["launch", "status", "kill", "tail-logs"])
@pytest.mark.parametrize(
    ("container", "code", "says"),
    [("ct201", 69, ["container 201", "stopped", "pct start 201"]), ("ct999", 78, ["no container 999"])],
)
def test_a_container_that_is_not_there(dflash: Dflash, verb: str, container: str, code: int, says: list[str]) -> None:
    dflash.job()
    if verb == "kill":
        failed = dflash("kill", "none", "-y", "--container", container, code=code)
        assert all(part in failed.stderr for part in says)
    else:
        refused(dflash, code, *says, container=container, verb=verb)


def test_a_wrong_key(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    if not (lab.ssh / "id_wrong").exists():
        lab.make_key("id_wrong")
    dflash.inventory["hosts"]["node"]["identity"] = str(lab.ssh / "id_wrong")
    refused(dflash, 77, "refused every key")
    nothing_left(dflash)


def test_an_unknown_host_key(dflash: Dflash) -> None:
    dflash.job()
    (dflash.folder / "empty").write_text("")
    dflash.inventory["hosts"]["node"]["known_hosts"] = str(dflash.folder / "empty")
    refused(dflash, 77, "host key", "not known", "dflash trust node")
    nothing_left(dflash)
    assert (dflash.folder / "empty").read_text() == ""


def test_a_changed_host_key(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    if not (lab.ssh / "other_host").exists():
        lab.make_key("other_host")
    kind, key, *_ = (lab.ssh / "other_host.pub").read_text().split()
    changed = dflash.folder / "changed"
    changed.write_text(f"[127.0.0.1]:{lab.port} {kind} {key}\n")
    dflash.inventory["hosts"]["node"]["known_hosts"] = str(changed)
    refused(dflash, 77, "CHANGED", "ssh-keygen")
    nothing_left(dflash)


def test_a_host_that_is_down(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    lab.stop_sshd()
    refused(dflash, 69, "refused the connection")
    lab.start_sshd()
    nothing_left(dflash)


def test_a_node_without_pct(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    with faults.no_pct(lab):
        refused(dflash, 78, "/usr/sbin/pct")
    nothing_left(dflash)


def test_another_user_than_root_without_sudo(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    with faults.user(lab, "guest"):
        dflash.inventory["hosts"]["node"]["user"] = "guest"
        refused(dflash, 77, "needs root", "sudo")
        dflash.inventory["hosts"]["node"]["sudo"] = True
        refused(dflash, 77, "NOPASSWD")
    nothing_left(dflash)


def test_the_line_for_sudoers_that_the_refusal_names_is_enough(lab: Lab, dflash: Dflash) -> None:
    dflash.job(config={"steps": None})
    dflash.inventory["hosts"]["node"] |= {"user": "operator1", "sudo": True}
    with faults.user(lab, "operator1"):
        refusal = dflash("launch", "job", "--run", "none", code=77).stderr
    line = refusal.split("`")[1].replace("USER", "operator1")
    with faults.user(lab, "operator1", line):
        dflash("launch", "job", "--run", "sudoer")
        assert dflash.state("sudoer") == "running"
        assert "hello" in dflash("tail-logs", "sudoer", "--no-follow", "-n", "1000").stdout
        assert dflash.exec("sudoer", *EVERY_BYTE) == bytes(range(256)) * 1000
        assert dflash.json("kill", "sudoer", "-y")["outcome"] == "stopped"
        other = subprocess.run(
            [*lab.ssh_command(user="operator1"), "sudo -n /usr/sbin/pct stop 200"], capture_output=True, timeout=30
        )
        assert other.returncode != 0
    assert lab.container_pid() is not None


def test_a_container_without_python(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    with faults.no_python(lab):
        refused(dflash, 78, "python3")
    nothing_left(dflash)


def test_a_full_disk_is_said_before_anything_is_made(lab: Lab, dflash: Dflash) -> None:
    dflash.job()
    with faults.small_disk(lab, dflash.root, 4):
        refused(dflash, 78, "full")
        assert lab.container("find", dflash.root, "-type", "f").stdout == ""
    nothing_left(dflash)


def test_an_interpreter_that_does_not_exist(dflash: Dflash) -> None:
    dflash.job()
    dflash.inventory["environments"]["venv"]["python"] = "/opt/none/bin/python"
    refused(dflash, 78, "/opt/none/bin/python")
    nothing_left(dflash)


# ---- the release ------------------------------------------------------------------------------------------------


def test_an_upload_that_is_cut_off_never_becomes_a_release(lab: Lab, dflash: Dflash) -> None:
    source = dflash.folder / "large"
    shutil.copytree(STAND_IN, source)
    (source / "ballast.bin").write_bytes(os.urandom(48 << 20))
    dflash.job(source=str(source), config={"steps": 1})

    def growing() -> str:
        return lab.container("sh", "-c", f"find {dflash.root} -size +200k | head -1", check=False).stdout

    for how in (signal.SIGKILL, signal.SIGTERM):
        launching = dflash.start("launch", "job", "--run", "cutoff")
        wait_for("the upload has begun", growing, 60)
        launching.send_signal(how)
        launching.wait(30)
        wait_for("the remote end has given up", lambda: not growing(), 30)
        names = lab.container("sh", "-c", f"ls {dflash.root}/releases").stdout.split()
        assert [name for name in names if len(name) == 32] == []
        assert dflash.runs() == []
    dflash("launch", "job", "--run", "cutoff")
    dflash.wait_state("cutoff", "succeeded")


def test_a_release_that_was_damaged_in_the_container_is_not_run(lab: Lab, dflash: Dflash) -> None:
    dflash.launch("before", steps=1)
    release = json.loads(dflash.run_file("before", "spec.json"))["release"]
    lab.container(
        "sh",
        "-c",
        f"chmod -R u+w {dflash.root}/releases; echo oops >>{dflash.root}/releases/{release}/trainer/__main__.py",
    )
    dflash.job(config={"steps": 1})
    after = dflash("launch", "job", "--run", "after", code=None)
    assert after.returncode == 0 or "release" in after.stderr
    if after.returncode == 0:
        assert "oops" not in lab.container("cat", f"{dflash.root}/releases/{release}/trainer/__main__.py").stdout
