"""`dflash doctor` says each fault on a line of its own, with the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import UsageError
from dflash_ops.inventory.models import ContainerEntry, Inventory
from dflash_ops.plan.release import Release, ReleaseFile
from dflash_ops.run.facts import Facts
from dflash_ops.transport.base import Misconfigured, NoPython, Unreachable
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.doctor import doctor
from dflash_ops.verbs.doctor_lines import (
    Elsewhere,
    Line,
    Node,
    Trial,
    gpu_lines,
    node_lines,
    python_lines,
    release_line,
    system_lines,
    trial_lines,
)
from dflash_ops.verbs.session import open_session
from tests.ops.kept_facts import FIXTURES, given


def levels(lines: Any) -> dict[str, str]:
    """The worst level of each topic."""
    order = ("ok", "unknown", "warn", "fail")
    found: dict[str, str] = {}
    for line in lines:
        found[line.topic] = max(found.get(line.topic, "ok"), line.level, key=order.index)
    return found


def said(lines: Any, topic: str) -> Line:
    return next(line for line in lines if line.topic == topic and line.level != "ok")


def all_lines(facts: Facts) -> list[Line]:
    return [*system_lines(facts, facts.time, 0.5), *python_lines(facts, "build it"), *gpu_lines(facts, None)]


def test_a_healthy_container_has_only_ok_lines() -> None:
    assert set(levels(all_lines(given())).values()) == {"ok"}


@pytest.mark.parametrize(
    ("change", "topic", "level", "words"),
    [
        ({"system__pid1": "init"}, "systemd", "fail", "not systemd"),
        ({"system__systemd": 237}, "systemd", "fail", "too old"),
        ({"disk__root__free": 100 << 20}, "disk", "fail", "100 MiB"),
        ({"disk__root__free": 5 << 30}, "disk", "warn", "5.0 GiB"),
        ({"disk__root__inodes_free": 3}, "disk", "fail", "3 inodes"),
        ({"disk__shm__free": 64 << 20}, "/dev/shm", "warn", "64"),
        ({"limits": {"open files": ["1024", "20000"]}}, "limits", "warn", "20000"),
        ({"python": {"error": "no such file"}}, "python", "fail", "no such file"),
        ({"python__version": "3.9.2"}, "python", "fail", "3.9.2"),
        ({"packages": {"torch": "2.11.0", "triton": "3.6.0"}}, "packages", "fail", "transformers not installed"),
        ({"packages": {"torch": "2.11.0", "transformers": "5"}}, "packages", "fail", "triton not installed"),
        (
            {"torch__files__state": "changed", "torch__files__added": ["torch/fx/p.py"]},
            "torch",
            "fail",
            "torch/fx/p.py",
        ),
        ({"torch__files__state": "unknown", "torch__files__reason": "no RECORD"}, "torch", "unknown", "no RECORD"),
        ({"hooks": [{"file": "/x/evil.pth", "what": "pth", "sha256": "0"}]}, "hooks", "warn", "evil.pth"),
        ({"imported": {"error": "undefined symbol"}}, "import", "fail", "undefined symbol"),
        ({"imported__foreign": ["torch.fx is in /x.py"]}, "import", "fail", "/x.py"),
        ({"imported__cuda_available": False}, "cuda", "fail", "sees no GPU"),
        ({"imported__devices": 0}, "cuda", "warn", "nvidia-smi 1"),
        ({"driver__library": "535.86.10"}, "driver", "fail", "535.86.10"),
        ({"driver__library": None}, "driver", "fail", "no libnvidia-ml"),
        ({"gpu__nodes": ["/dev/nvidia0"]}, "uvm", "fail", "nvidia-uvm"),
        ({"gpu__command": {"state": "timeout", "seconds": 10}}, "gpu", "unknown", "10 s"),
    ],
)
def test_each_fault_gives_its_line_and_a_cure(change: dict[str, Any], topic: str, level: str, words: str) -> None:
    lines = all_lines(given(**change))
    assert levels(lines)[topic] == level
    line = said(lines, topic)
    assert words in line.text
    assert line.cure or level == "unknown"


def test_without_gpus_triton_may_be_missing() -> None:
    no_gpus = {"gpu__command": {"state": "missing"}, "gpu__nodes": [], "gpu__driver": None}
    facts = given(packages={"torch": "2.11.0", "transformers": "5"}, **no_gpus)
    assert levels(all_lines(facts))["packages"] == "ok"


@pytest.mark.parametrize(
    "change",
    [
        {"system__os": "\x1b[2J"},
        {"system": {"error": "\x1b[2J"}},
        {"disk": {"error": "\x1b[2J"}},
        {"limits": {"open files": ["1024", "\x1b[2J"]}},
        {"python__implementation": "\x1b[2J"},
        {"python__version": "\x1b[2J"},
        {"hooks": {"error": "\x1b[2J"}},
        {"imported__cuda": "\x1b[2J"},
    ],
)
def test_no_fact_of_a_container_can_steer_the_terminal(change: dict[str, Any]) -> None:
    text = "".join(f"{line.topic}{line.text}{line.cure}" for line in all_lines(given(**change)))
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_a_clock_that_is_an_hour_off_is_a_warning_in_both_directions() -> None:
    facts = given()
    for offset, word in ((3600.0, "behind"), (-3600.0, "ahead")):
        lines = list(system_lines(facts, facts.time + offset, 0.5))
        assert word in said(lines, "clock").text


def test_known_hooks_are_no_oddity() -> None:
    hooks = [{"file": "/v/site-packages/distutils-precedence.pth", "what": "pth", "sha256": "0"}]
    assert "hooks" not in levels(all_lines(given(hooks=hooks)))


NODE: dict[str, Any] = {
    "user": 0,
    "hostname": "pve1",
    "kernel": "6.8",
    "time": 0,
    "pct": True,
    "version": "pve-manager/9.0",
    "status": "status: running",
    "status_error": "",
    "config": {"features": "nesting=1"},
    "config_error": "",
    "other_node": None,
    "driver": None,
    "nodes": [],
    "holders": [],
}
ENTRY = ContainerEntry(host="pve1", container=200)


@pytest.mark.parametrize(
    ("change", "topic", "level"),
    [
        ({}, "state", "ok"),
        ({"pct": False}, "node", "fail"),
        ({"status": "status: stopped"}, "state", "fail"),
        ({"status": None, "status_error": "please run as root"}, "state", "unknown"),
        ({"other_node": "pve2"}, "state", "fail"),
        ({"config": {"lock": "backup", "features": "nesting=1"}}, "lock", "warn"),
        ({"config": {}}, "nesting", "warn"),
        ({"config": None}, "config", "unknown"),
        ({"driver": "580.1"}, "uvm", "fail"),
    ],
)
def test_the_nodes_view_of_the_container_is_judged(change: dict[str, Any], topic: str, level: str) -> None:
    assert levels(node_lines(Node.model_validate({**NODE, **change}), ENTRY))[topic] == level


def test_a_trainer_edited_in_the_container_is_named() -> None:
    release = Release(Path("/x"), (ReleaseFile("a.py", 1, "11", False), ReleaseFile("b.py", 1, "22", False)), "f" * 32)
    same = {"path": "/r", "files": {"trainer/a.py": "11", "trainer/b.py": "22", ".manifest.json": "33"}}
    assert release_line(given(release=same), release).level == "ok"
    edited = {"path": "/r", "files": {"trainer/a.py": "11", "trainer/b.py": "99"}}
    line = release_line(given(release=edited), release)
    assert (line.level, "trainer/b.py" in line.text) == ("fail", True)


def ssh_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Any], environment: str | None = None, **entry: Any
) -> list[Line]:
    """What doctor says of a host; `answers`: of the host, then of the container. An empty list connects for real."""
    given: dict[str, Any] = {"hosts": {"main": {"address": "127.0.0.1", "port": 1, "ssh_config": "/dev/null", **entry}}}
    containers = {"far": {"host": "main", "container": 200}}
    environments = {"built": {"lock": folder / "lock.txt", "python": "3.11"}, "there": {"python": "/opt/python"}}
    given.update(containers=containers, environments=environments)
    inventory = Inventory.model_validate({"path": folder / "inventory.yaml", **given})
    if answers:
        transport = FakeTransport({"doctor": answers})
        monkeypatch.setattr("dflash_ops.transport.framed.FramedTransport", lambda *_: transport)
    return list(doctor(open_session(inventory, "far"), environment).lines)


def test_a_key_file_that_is_not_there_is_no_host_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = ssh_lines(tmp_path, monkeypatch, [], identity=str(tmp_path / "none"))
    assert (line.topic, line.level) == ("ssh", "fail")
    assert "does not exist" in line.text
    assert "ssh-keygen" in str(line.cure)


def test_a_host_that_is_raised_by_a_command_names_it_when_it_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in ({"identity": str(tmp_path / "none")}, {}):
        (line,) = ssh_lines(tmp_path, monkeypatch, [], cure="`make lab-up` raises it", **entry)
        assert (line.level, line.cure) == ("fail", "`make lab-up` raises it")


def test_only_a_host_without_python_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = Unreachable("the container is stopped")
    seen = levels(ssh_lines(tmp_path, monkeypatch, [NoPython("there is no python3"), down]))
    assert (seen["ssh"], seen["node"], seen["container"]) == ("ok", "unknown", "fail")
    (line,) = ssh_lines(tmp_path, monkeypatch, [Misconfigured("something else"), down])
    assert (line.topic, line.level) == ("ssh", "fail")


def test_an_environment_that_is_not_there_is_cured_by_its_own_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock.txt").write_text("torch==2.11\n")
    value = json.loads((FIXTURES / "facts.json").read_text()) | {"python": {"error": "no such file"}}
    cures = {"built": "`dflash env build built`", "there": f"environment there in {tmp_path}/inventory.yaml"}
    for environment, cure in cures.items():
        lines = ssh_lines(tmp_path, monkeypatch, [NoPython("none"), value], environment)
        assert cure in str(said(lines, "python").cure)
    with pytest.raises(UsageError) as caught:
        ssh_lines(tmp_path, monkeypatch, [NoPython("none"), value], "nope")
    assert caught.value.hint == "known: built, there"


def test_doctor_tries_what_a_launch_does_and_names_each_cure() -> None:
    trial = Trial(
        unit="Failed to start transient service unit: Access denied",
        refused={"/dev/nvidia-uvm": "EPERM", "/dev/nvidia0": "ENXIO"},
        noexec=True,
        elsewhere=[Elsewhere(run="r7", directory="/srv/other/runs/r7")],
    )
    lines = list(trial_lines(trial))
    assert [(line.topic, line.level) for line in lines] == [
        ("launch", "fail"), ("root", "fail"), ("device", "fail"), ("device", "fail"), ("runs", "warn"),
    ]  # fmt: skip
    assert "`devN: /dev/nvidia-uvm`" in str(lines[2].cure)
    assert "wrong major" in str(lines[3].cure)
    assert "/srv/other/runs/r7" in lines[4].text
    (well,) = trial_lines(Trial(unit=None, refused={}, noexec=False, elsewhere=[]))
    assert well.level == "ok"
