"""Tests the verbs that look at runs on a real container, also when a probe hangs or the connection breaks."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.lab import Lab, wait_for
from tests.lab.user import STAND_IN, Dflash

pytestmark = pytest.mark.lab

H200 = "0, GPU-935cfc65, NVIDIA H200, 100, 90000, 143771, 131.00, 700.00, 60, Disabled, 580.159.04, 00000000:06:00.0"
ON_GPU = {"targets": ["cuda:0"], "drafters": ["cuda:0"]}

# A trainer that saves on SIGUSR2, a checkpoint of 24 MB that does not compress.
SAVES = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
def save(*_):
    folder = run / "checkpoints" / "step-00000007.tmp"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(24_000_000))
    (folder / "manifest.json").write_text(json.dumps({"step": 7}))
    folder.rename(run / "checkpoints" / "step-00000007")
signal.signal(signal.SIGUSR2, save)
print("2026-11-30T07:20:00.123Z INFO main ready", flush=True)
while True:
    time.sleep(0.1)
"""


def source(folder: Path, text: str) -> str:
    """A trainer package of one file."""
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text(text)
    return str(folder)


def test_wait_returns_when_the_run_is_as_far_with_its_exit_code(dflash: Dflash) -> None:
    dflash.launch("open", "--wait", "none")
    assert dflash.json("wait", "open", "--for", "step")["reached"] is True
    dflash("wait", "open", "--timeout", "0.1", code=101)
    dflash("kill", "open", "-y")
    dflash("wait", "open", code=103)
    dflash.launch("good", "--wait", "none", steps=2)
    assert dflash.json("wait", "good")["status"]["state"] == "succeeded"
    dflash.launch("bad", "--wait", "none", die="exit", steps=1)
    dflash("wait", "bad", code=100)
    dflash("wait", "nobody", code=102)
    table = dflash("runs").stdout.splitlines()
    found = [line.split()[:2] for line in table[1:]]
    assert found == [["bad", "failed"], ["good", "succeeded"], ["open", "cancelled"]]
    listed = dflash.json("runs", "-n", "1")
    assert ([run["run"] for run in listed["runs"]], listed["total"]) == (["bad"], 3)


def test_a_checkpoint_is_asked_for_and_pulled_whole_after_a_pull_that_was_killed(
    dflash: Dflash, tmp_path: Path
) -> None:
    dflash.job("saver", source=source(tmp_path / "saver", SAVES))
    dflash("launch", "saver", "--run", "saver")
    saved = dflash.json("checkpoint", "saver")
    assert saved["checkpoint"]["name"] == "step-00000007"
    here = tmp_path / "here"
    partial = here / "saver/checkpoints/step-00000007.partial/model.safetensors"
    process = dflash.start("pull", "saver", "--to", str(here))
    wait_for("some megabytes are here", lambda: (partial.exists() and partial.stat().st_size > 2_000_000) or None)
    process.kill()
    process.communicate()
    assert not (here / "saver/checkpoints/step-00000007").exists()
    pulled = dflash.json("pull", "saver", "--to", str(here))
    assert 0 < pulled["received"] < 23_000_000
    there = dflash.lab.container("sha256sum", f"{dflash.root}/runs/saver/checkpoints/step-00000007/model.safetensors")
    local = (here / "saver/checkpoints/step-00000007/model.safetensors").read_bytes()
    assert hashlib.sha256(local).hexdigest() == there.stdout.split()[0]


def test_a_trainer_that_does_not_listen_is_not_killed_by_the_request(dflash: Dflash) -> None:
    dflash.launch("deaf")
    refused = dflash("checkpoint", "deaf", code=75)
    assert "does not take requests yet" in refused.stderr
    assert dflash.state("deaf") == "running"


def test_a_hanging_nvidia_smi_is_unknown_and_asked_only_once(lab: Lab, dflash: Dflash) -> None:
    with faults.nvidia_smi(lab, "trap '' TERM; exec sleep 300"):
        dflash.launch("watched")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: dflash.json("status", "watched"), range(4)))
        assert {answer["state"] for answer in answers} == {"running"}
        assert {answer["gpu"]["kind"] for answer in answers} == {"unknown"}
        assert lab.container("pgrep", "-fc", "sleep 300", check=False).stdout.strip() in ("0", "1")


def test_gpus_are_shown_by_role_and_a_clock_that_jumped_makes_no_run_stalled(lab: Lab, dflash: Dflash) -> None:
    with faults.nvidia_smi(lab, f"echo '{H200}'"):
        dflash.job("silent", config={"quiet": True, "pause": 3600, "pipeline": ON_GPU})
        dflash("launch", "silent", "--run", "silent")
        answer = dflash.json("status", "silent")
        assert (answer["state"], answer["roles"]) == ("running", {"target": [0], "drafters": [0]})
        assert answer["gpu"]["devices"][0]["power"] == 131.0
        assert "spinning" in dflash("status", "silent").stdout
        # A log older than its process: what an hour's jump of the clock looks like.
        lab.container("touch", "-d", "1 hour ago", f"{dflash.root}/runs/silent/log")
        assert dflash.json("status", "silent")["state"] == "unknown"


def test_twenty_status_at_once_all_answer(dflash: Dflash) -> None:
    dflash.launch("popular")
    with ThreadPoolExecutor(20) as pool:
        states = list(pool.map(lambda _: dflash.state("popular"), range(20)))
    assert states == ["running"] * 20


def test_doctor_grounds_each_line_and_fails_by_its_exit_code(lab: Lab, dflash: Dflash) -> None:
    dflash.launch("any", steps=1)
    found = {line["topic"]: line for line in dflash.json("doctor")["lines"]}
    for topic in (
        "ssh",
        "node",
        "state",
        "container",
        "systemd",
        "clock",
        "disk",
        "python",
        "packages",
        "torch",
        "import",
    ):
        assert found[topic]["level"] == "ok", found[topic]
    assert "none in the container" in found["gpu"]["text"]
    stopped = dflash.json("doctor", "ct201", code=78)["lines"]
    assert {line["topic"]: line["level"] for line in stopped}["state"] == "fail"
    assert all(line["cure"] for line in stopped if line["level"] == "fail")
    lab.stop_sshd()
    assert [line["topic"] for line in dflash.json("doctor", code=78)["lines"]] == ["ssh"]


def test_diff_names_the_changed_line_of_code_and_the_changed_setting(dflash: Dflash, tmp_path: Path) -> None:
    before = (STAND_IN / "__main__.py").read_text()
    for run, text, steps in (("good", before, 1), ("bad", before.replace("4.0 / step", "5.0 / step"), 2)):
        dflash.job(run, source=source(tmp_path / run, text), config={"steps": steps})
        dflash("launch", run, "--run", run)
    found = dflash.json("diff", "good", "bad")
    assert [file["path"] for file in found["code"]] == ["trainer/__main__.py"]
    assert '+    record |= {"loss": 5.0 / step' in found["code"][0]["diff"]
    changed = {(one["section"], one["key"]) for one in found["differences"]}
    assert ("config", "steps") in changed
    assert not {section for section, _ in changed} & {"packages", "driver", "gpus", "system", "torch"}


def test_no_verb_shows_a_secret(dflash: Dflash, tmp_path: Path) -> None:
    canary = "canary-91c2f0"
    dflash.environment["SECRET"] = canary
    dflash.job("secret", config={"steps": 1}, env={"HF_TOKEN": "env:SECRET"})
    dflash("launch", "secret", "--run", "secret", "--wait", "step")
    dflash.lab.container("rm", "-f", f"{dflash.root}/runs/secret/seen.json")  # the stand-in writes all it sees
    said = [
        dflash(*words).stdout for words in (("status", "secret", "--json"), ("runs", "--json"), ("doctor", "--json"))
    ]
    dflash("pull", "secret", "--what", "all", "--to", str(tmp_path / "here"))
    said += [path.read_text(errors="replace") for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert "HF_TOKEN" in "".join(said)
    assert canary not in "".join(said)
