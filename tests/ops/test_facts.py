"""Facts are read from a real interpreter and from made-up ones; doctor and diff are pure functions of them."""

from __future__ import annotations

import base64
import concurrent.futures
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.inventory.models import Inventory, TargetEntry
from dflash_ops.plan.release import Release, ReleaseFile
from dflash_ops.remote import facts as remote_facts
from dflash_ops.remote import gpu as remote_gpu
from dflash_ops.run.facts import Facts, read_facts
from dflash_ops.transport.base import Misconfigured, NoPython, Unreachable
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.diff import compare_code, compare_facts, compare_specs, diff, flat
from dflash_ops.verbs.doctor import Line, Node, doctor, gpu_lines, node_lines, python_lines, release_line, system_lines
from dflash_ops.verbs.session import Session, open_session
from tests.ops.evidence import spec
from tests.ops.inprocess import InProcess

FIXTURES = Path(__file__).parent / "fixtures"
GREW = {"bytes": 1 << 40, "files": 1, "newest": 1.0}


def given(**changes: Any) -> Facts:
    """Facts of a healthy container with one H200, changed where a test says. Dots in names reach into parts."""
    value = json.loads((FIXTURES / "facts.json").read_text())
    for name, change in changes.items():
        *parts, last = name.split("__")
        place = value
        for part in parts:
            place = place[part]
        place[last] = change
    return read_facts(value, "the test")


# ---- collecting --------------------------------------------------------------------------------------------


def test_the_facts_of_this_interpreter_are_read_in_the_form_that_is_known(tmp_path: Path) -> None:
    facts = read_facts(remote_facts.collect({"root": str(tmp_path), "python": sys.executable, "gpu": False}), "here")
    assert facts.packages["pydantic"]
    assert getattr(facts.python, "version", None) == ".".join(map(str, sys.version_info[:3]))
    assert getattr(facts.torch, "files", None) is not None
    assert facts.torch.files.state == "intact"  # type: ignore[union-attr]


def test_facts_hold_names_of_variables_and_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-7f3a")
    request = {"root": str(tmp_path), "python": sys.executable, "gpu": False, "variables": ["HF_TOKEN"]}
    text = json.dumps(remote_facts.collect(request))
    assert "HF_TOKEN" in text
    assert "canary-7f3a" not in text


def test_an_interpreter_that_is_not_there_is_a_fact_and_not_a_crash(tmp_path: Path) -> None:
    facts = read_facts(remote_facts.collect({"root": str(tmp_path), "python": "/no/python", "gpu": False}), "here")
    assert "No such file" in getattr(facts.python, "error", "")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site folder with a torch of two watched files, as pip would have installed it."""
    folder = tmp_path / "site-packages"
    rows = []
    for name in ("torch/_dynamo/eval_frame.py", "torch/fx/_symbolic_trace.py"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text("shipped\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"shipped\n").digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},8")
    info = folder / "torch-2.11.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("\n".join([*rows, "torch-2.11.0.dist-info/RECORD,,"]) + "\n")
    (folder / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    return folder


def torch_of(site: Path, end: float = float("inf")) -> dict[str, Any]:
    found = remote_facts._torch([str(site)], end)
    assert found is not None
    return found


def test_a_torch_as_it_was_shipped_is_intact(site: Path) -> None:
    found = torch_of(site)
    assert (found["version"], found["cuda"], found["files"]["state"]) == ("2.11.0", "13.0", "intact")


def test_an_edited_torch_file_is_named(site: Path) -> None:
    (site / "torch/fx/_symbolic_trace.py").write_text("is_fx_symbolic_tracing = lambda: False\n")
    files = torch_of(site)["files"]
    assert files["state"] == "changed"
    assert [one["file"] for one in files["changed"]] == ["torch/fx/_symbolic_trace.py"]


def test_a_deleted_and_an_added_file_are_changes(site: Path) -> None:
    (site / "torch/fx/_symbolic_trace.py").rename(site / "torch/fx/patch.py")
    files = torch_of(site)["files"]
    assert files["changed"] == [{"file": "torch/fx/_symbolic_trace.py", "sha256": "gone"}]
    assert files["added"] == ["torch/fx/patch.py"]


def test_time_that_is_up_makes_it_unknown_and_not_intact(site: Path) -> None:
    assert torch_of(site, end=0.0)["files"]["state"] == "unknown"


def test_a_torch_without_record_is_unknown(site: Path) -> None:
    (site / "torch-2.11.0.dist-info/RECORD").unlink()
    assert torch_of(site)["files"]["state"] == "unknown"


def test_start_up_hooks_are_found(site: Path) -> None:
    (site / "sitecustomize.py").write_text("import torch\n")
    (site / "patch.pth").write_text("import torch_patch\n")
    (site / "plain.pth").write_text("/some/folder\n")
    found = remote_facts._hooks([str(site)], None)
    assert [Path(hook["file"]).name for hook in found] == ["sitecustomize.py", "patch.pth"]


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(tmp_path: Path) -> None:
    for folder, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / folder / f"Some_Pkg-{version}.dist-info").mkdir(parents=True)
    assert remote_facts._packages([str(tmp_path / "a"), str(tmp_path / "b")]) == {"some-pkg": "2.0"}


# ---- nvidia-smi, bounded -----------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi on the path; the test writes what it does."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_nvidia_smi_that_hangs_is_given_up_and_ended(smi: Path, tmp_path: Path) -> None:
    write(smi, f"echo $$ > {tmp_path}/pid; exec sleep 100")
    answer = remote_gpu.ask(str(tmp_path), 1.0)
    assert answer["command"]["state"] == "timeout"
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_while_one_hangs_no_second_one_is_started(smi: Path, tmp_path: Path) -> None:
    write(smi, f"touch {tmp_path}/started")
    with (tmp_path / "gpu.lock").open("w") as lock:
        # A child in a driver call that nothing ends holds the lock beyond the probe that started it.
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = remote_gpu.ask(str(tmp_path), 0.2)
    assert (answer["command"]["state"], answer["command"]["pid"]) == ("busy", 4711)
    assert not (tmp_path / "started").exists()


def test_the_child_itself_holds_the_lock(smi: Path, tmp_path: Path) -> None:
    write(smi, "exec sleep 100")
    held = subprocess.Popen(
        [sys.executable, "-c", f"from dflash_ops.remote import gpu; gpu.ask({str(tmp_path)!r}, 60)"],
    )
    try:
        lock = tmp_path / "gpu.lock"
        while not lock.exists() or not lock.read_bytes().strip():
            assert held.poll() is None
        child = int(lock.read_bytes().split()[0])
        held.kill()
        held.wait()
        assert remote_gpu.ask(str(tmp_path), 0.2)["command"] == pytest.approx(
            {"state": "busy", "pid": child, "seconds": 0}, abs=30
        )
        os.kill(child, 9)
        write(smi, "echo fine")
        assert remote_gpu.ask(str(tmp_path), 10)["command"]["stdout"] == "fine\n"
    finally:
        held.kill()
        held.wait()


def test_twenty_probes_at_once_all_get_an_answer(smi: Path, tmp_path: Path) -> None:
    write(smi, "echo fine")
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: remote_gpu.ask(str(tmp_path), 30)["command"], range(20)))
    assert {answer["state"] for answer in answers} == {"ran"}


def test_without_nvidia_smi_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remote_gpu.ask(str(tmp_path))["command"] == {"state": "missing"}


# ---- doctor ------------------------------------------------------------------------------------------------


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
ENTRY = TargetEntry(host="pve1", container=200)


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
    targets = {"far": {"host": "main", "container": 200}}
    environments = {"built": {"lock": folder / "lock.txt", "python": "3.11"}, "there": {"python": "/opt/python"}}
    given.update(targets=targets, environments=environments)
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


# ---- diff --------------------------------------------------------------------------------------------------


def test_two_times_the_same_facts_do_not_differ_even_when_load_and_free_memory_do() -> None:
    later = given(time=1.0, system__memory_available=7, disk__root__free=9, boot_id="other")
    assert list(compare_facts(given(), later)) == []


@pytest.mark.parametrize(
    ("change", "section", "key"),
    [
        ({"packages__torch": "2.12.0"}, "packages", "torch"),
        ({"driver__kernel": "570.1"}, "driver", "kernel module"),
        ({"driver__library": None}, "driver", "libnvidia-ml"),
        ({"torch__files__state": "changed"}, "torch", "files"),
        ({"python__version": "3.12.1"}, "environment", "interpreter"),
        ({"gpu__command": {"state": "missing"}}, "gpus", "GPUs"),
        ({"compile_cache__files": 0}, "cache", "state"),
        ({"compile_cache__keys": {}}, "cache", "key 5f2c"),
        ({"compile_cache__keys": {"5f2c": GREW, "c1d3": GREW}}, "cache", "key c1d3"),
        ({"system__kernel": "6.9"}, "system", "kernel"),
        ({"limits": {"open files": ["1024", "99"]}}, "system", "limit open files"),
        ({"hooks": [{"file": "/x.pth", "what": "pth", "sha256": "ab"}]}, "environment", "start-up hook /x.pth"),
        ({"manager_variables": ["LANG"]}, "environment", "systemd's variables"),
    ],
)
def test_each_change_is_found_and_nothing_else(change: dict[str, Any], section: str, key: str) -> None:
    found = {(one.section, one.key) for one in compare_facts(given(), given(**change))}
    assert (section, key) in found
    assert {one[0] for one in found} == {section}


def test_configs_are_compared_key_by_key() -> None:
    a = spec(config={"optimizer": {"lr": 6e-4, "name": "adamw"}})
    b = spec(config={"optimizer": {"lr": 1e-4, "name": "adamw"}, "seed": 1})
    found = {one.key: (one.a, one.b) for one in compare_specs(a, b)}
    assert found == {"optimizer.lr": ("0.0006", "0.0001"), "seed": (None, "1")}


def test_flat_keeps_empty_mappings_and_nulls_visible() -> None:
    assert flat({"a": {}, "b": None, "c": {"d": [1]}}) == {"a": "{}", "b": "null", "c.d": "[1]"}


def test_code_is_shown_as_a_unified_diff_that_cannot_steer_the_terminal() -> None:
    (one,) = compare_code({"trainer/step.py": ["a\nb\n", "a\n\x1b[2Jc\n"]}, "r1", "r2")
    assert one.diff.splitlines() == [
        "--- r1/trainer/step.py",
        "+++ r2/trainer/step.py",
        "@@ -1,2 +1,2 @@",
        " a",
        "-b",
        "+\\x1b[2Jc",
    ]


def test_a_file_that_only_one_run_has_is_shown_whole() -> None:
    (one,) = compare_code({"trainer/new.py": [None, "x\n"]}, "r1", "r2")
    assert "+x" in one.diff


def make_run(root: Path, name: str, release: str, text: str, data: str | None) -> None:
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    kept = spec(run=name, release=release).model_dump(by_alias=True)
    (folder / "spec.json").write_text(json.dumps(kept))
    (folder / "facts.json").write_text((FIXTURES / "facts.json").read_text())
    code = root / "releases" / release / "trainer"
    code.mkdir(parents=True, exist_ok=True)
    (code / "step.py").write_text(text)
    (code / "same.py").write_text("same\n")
    if data is not None:
        (folder / "log").write_text(f"2026-11-30T07:20:00.123Z INFO main drafter of 2 layers of /t; rows {data}\n")


def test_diff_answers_what_changed_between_two_kept_runs(tmp_path: Path) -> None:
    make_run(tmp_path, "good", "a" * 32, "lr = 1\n", "1" * 32)
    make_run(tmp_path, "bad", "b" * 32, "lr = 2\n", "2" * 32)
    answer = diff(Session(None, "lab", InProcess(tmp_path), quiet=True), "good", "bad")  # type: ignore[arg-type]
    assert [file.path for file in answer.code] == ["trainer/step.py"]
    assert {(one.section, one.key) for one in answer.differences} == {("code", "release"), ("data", "rows")}
    assert answer.incomplete == ()


def test_diff_says_what_it_could_not_compare(tmp_path: Path) -> None:
    make_run(tmp_path, "a", "a" * 32, "x\n", None)
    make_run(tmp_path, "b", "a" * 32, "x\n", "2" * 32)
    (tmp_path / "runs/a/facts.json").unlink()
    answer = diff(Session(None, "lab", InProcess(tmp_path), quiet=True), "a", "b")  # type: ignore[arg-type]
    assert answer.same
    assert len(answer.incomplete) == 2


def test_a_run_with_a_damaged_spec_is_refused_in_a_sentence(tmp_path: Path) -> None:
    make_run(tmp_path, "a", "a" * 32, "x\n", None)
    make_run(tmp_path, "b", "a" * 32, "x\n", None)
    (tmp_path / "runs/b/spec.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigurationError, match="damaged"):
        diff(Session(None, "lab", InProcess(tmp_path), quiet=True), "a", "b")  # type: ignore[arg-type]
