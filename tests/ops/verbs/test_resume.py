"""A run goes on under a new name from what the old one left: same code, configuration and interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError, DflashError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.plan.release import pack, trainer_source
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.resume import ResumeOptions, resume
from dflash_ops.verbs.session import Session
from tests.ops.evidence import spec
from tests.ops.jobs import PREFLIGHT, snapshot

INVENTORY = """\
containers: {here: {host: local}}
environments: {venv: {python: /opt/venv/bin/python}}
jobs:
  smoke: {config: {}, source: package, env: {TOKEN: env:CANARY}}
"""
TWO = INVENTORY.replace("containers: {", "containers: {there: {host: local}, ")


def facts(torch: str, *caches: str) -> dict[str, Any]:
    unread = {"error": "not read"}
    keys = {key: {"bytes": 1229, "files": 1, "newest": 1.0} for key in caches}
    return {
        "time": 1.0,
        "boot_id": "b",
        "system": unread,
        "packages": {"torch": torch},
        "driver": {"kernel": None, "library": None},
        "limits": unread,
        "disk": unread,
        "compile_cache": {"path": "/c", "bytes": 1, "files": 1, "keys": keys},
    }


def opened(
    folder: Path, old: dict[str, Any], inventory: str = INVENTORY, total: int | None = 400, **preflight: Any
) -> tuple[Session, FakeTransport]:
    (folder / "inventory.yaml").write_text(inventory)
    answer = {
        "spec": old,
        "checkpoint": "step-00000200",
        "step": 200,
        "total": total,
        "then": facts("2.12"),
        "now": facts("2.13", "c1d3"),
    }
    transport = FakeTransport(
        {
            "resume": [answer],
            "preflight": [{**PREFLIGHT, **preflight}],
            "launch": [{"reached": "started", "snapshot": snapshot("r8")}],
        }
    )
    return Session(load_inventory(folder / "inventory.yaml"), "here", transport), transport


def old_spec(**changes: Any) -> dict[str, Any]:
    return spec(**changes).model_dump(by_alias=True)


def test_the_new_run_is_the_old_one_from_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session, transport = opened(tmp_path, old_spec(watchdog=60))
    report = resume(session, ResumeOptions("r7", name="r8", set=("optimizer.lr=1e-5",)))
    assert (report.run, report.kind) == ("r8", "resume")
    request = transport.calls[-1].request
    assert request["spec"]["resumed_from"] == "/var/lib/dflash/runs/r7"
    assert request["spec"]["release"] == "a" * 32
    assert request["spec"]["python"] == "/opt/venv/bin/python"
    assert request["spec"]["watchdog"] == 60
    assert request["spec"]["config"]["optimizer"] == {"lr": 1e-5}
    assert request["spec"]["config"]["pipeline"] == {"targets": ["cpu"], "drafters": ["cpu"]}
    assert "--resume-from /var/lib/dflash/runs/r7" in request["files"]["entry"]
    said = capsys.readouterr().err
    assert "changed since: packages torch: 2.12 -> 2.13" in said
    assert "c1d3" not in said  # a cache grows in every run
    assert "None" not in said
    assert [call.verb for call in transport.calls] == ["resume", "preflight", "launch"]


def test_code_that_is_gone_is_not_replaced_unasked(tmp_path: Path) -> None:
    session, transport = opened(tmp_path, old_spec(), release="missing")
    with pytest.raises(ConfigurationError, match="is missing") as caught:
        resume(session, ResumeOptions("r7", name="r8"))
    assert "--current-code" in caught.value.hint
    assert "store" not in [call.verb for call in transport.calls]


def test_current_code_is_what_the_job_has_now(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("new\n")
    session, transport = opened(tmp_path, old_spec())
    resume(session, ResumeOptions("r7", name="r8", current_code=True))
    assert transport.calls[-1].request["spec"]["release"] != "a" * 32


def test_variables_are_read_anew_and_a_job_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "value-of-now")
    session, transport = opened(tmp_path, old_spec(variables=["TOKEN"]))
    resume(session, ResumeOptions("r7", name="r8"))
    assert "TOKEN=value-of-now\n" in transport.calls[-1].request["files"]["env"]
    session, _ = opened(tmp_path, old_spec(variables=["TOKEN"], job="deleted"))
    with pytest.raises(ConfigurationError, match="job deleted"):
        resume(session, ResumeOptions("r7", name="r8"))


@pytest.mark.parametrize("inventory", [TWO, TWO.replace("smoke: {", "smoke: {containers: [there], ")])
@pytest.mark.parametrize("current_code", [False, True])
def test_a_container_cannot_ask_for_another_container_s_secrets_or_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inventory: str, current_code: bool
) -> None:
    monkeypatch.setenv("CANARY", "value-of-now")
    session, transport = opened(tmp_path, old_spec(variables=[] if current_code else ["TOKEN"]), inventory)
    with pytest.raises(ConfigurationError, match="job smoke, which the inventory does not give to here") as caught:
        resume(session, ResumeOptions("r7", name="r8", current_code=current_code))
    assert "add here to the job's `containers`" in caught.value.hint
    assert [call.verb for call in transport.calls] == ["resume"]


def test_a_job_that_the_inventory_gives_to_the_container_gets_its_secrets_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "value-of-now")
    given = TWO.replace("smoke: {", "smoke: {containers: [there, here], ")
    session, transport = opened(tmp_path, old_spec(variables=["TOKEN"]), given)
    resume(session, ResumeOptions("r7", name="r8"))
    assert "TOKEN=value-of-now\n" in transport.calls[-1].request["files"]["env"]


def test_a_spec_that_is_no_spec_is_one_sentence(tmp_path: Path) -> None:
    session, _ = opened(tmp_path, {"run": 1})
    with pytest.raises(DflashError, match="in a form that this dflash does not know"):
        resume(session, ResumeOptions("r7"))


@pytest.mark.parametrize(
    ("optimizer", "changes", "total", "cure"),
    [
        ({"max_steps": 200}, (), 200, "--set optimizer.max_steps=N"),
        ({"max_steps": 200}, ("optimizer.lr=1",), 200, "--set optimizer.max_steps=N"),
        ({"max_steps": 200}, ("optimizer.max_steps=200",), 200, "--set optimizer.max_steps=N"),
        ({"max_steps": 200}, ("data.epochs=9",), 200, "--set optimizer.max_steps=N"),
        ({}, (), 200, "--set data.epochs=N"),
        ({"max_steps": 200}, ("optimizer.max_steps=300",), 200, ""),
        ({}, ("data.epochs=9",), 200, ""),
        ({"max_steps": 300}, (), 300, ""),
        ({}, (), None, ""),
    ],
)
def test_a_run_that_did_all_its_steps_is_resumed_only_to_do_more(
    tmp_path: Path, optimizer: dict[str, Any], changes: tuple[str, ...], total: int | None, cure: str
) -> None:
    given = INVENTORY.replace(", source: package", "")
    session, transport = opened(tmp_path, old_spec(config={"optimizer": optimizer}), given, total)
    options = ResumeOptions("r7", name="r8", set=changes)
    if not cure:
        assert resume(session, options).run == "r8"
        return
    with pytest.raises(ConfigurationError, match=r"r7 has finished \(200/200\)") as caught:
        resume(session, options)
    assert cure in caught.value.hint
    assert [call.verb for call in transport.calls] == ["resume"]


def test_what_makes_other_code_s_runs_longer_is_not_judged(tmp_path: Path) -> None:
    session, _ = opened(tmp_path, old_spec(), total=200)
    with pytest.raises(ConfigurationError, match="has finished") as caught:
        resume(session, ResumeOptions("r7", name="r8"))
    assert caught.value.hint == "give what makes it longer by --set"
    session, _ = opened(tmp_path, old_spec(), total=200)
    assert resume(session, ResumeOptions("r7", name="r8", set=("steps=9",))).run == "r8"


def test_a_change_that_the_trainer_here_would_refuse_is_refused_here(tmp_path: Path) -> None:
    given = INVENTORY.replace(", source: package", "")
    session, transport = opened(tmp_path, old_spec(release=pack(trainer_source()).name), given)
    with pytest.raises(ConfigurationError, match=r"--set optimizer.lrr: unknown key"):
        resume(session, ResumeOptions("r7", name="r8", set=("optimizer.lrr=1",)))
    assert [call.verb for call in transport.calls] == ["resume"]
