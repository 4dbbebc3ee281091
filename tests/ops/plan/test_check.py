"""A configuration that the trainer would refuse is refused here, and the user's own file and line are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.plan.plan import LaunchOptions, Plan, plan
from dflash_ops.run.record import RootPaths

INVENTORY = """\
containers: {here: {host: local}}
environments: {venv: {python: /opt/venv/bin/python}}
jobs:
  mini:
    config:
      target: {path: /srv/model}
      data:
        sources: [/srv/chats.jsonl]
      optimizer:
        max_steps: 6
    set:
      seed: 1
  file:
    config: run.yaml
    gpus: {target: 0, drafters: 1}
  own:
    config: {anything: goes}
    source: package
"""


def planned(folder: Path, job: str, *changes: str, old: str = "", new: str = "") -> Plan:
    assert old in INVENTORY
    (folder / "inventory.yaml").write_text(INVENTORY.replace(old, new) if old else INVENTORY)
    (folder / "run.yaml").write_text("target: {path: /m}\ndata:\n  sources: [/x]\n  epochs: 0\n")
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package/__main__.py").write_text("")
    inventory = load_inventory(folder / "inventory.yaml")
    return plan(inventory, "here", RootPaths("/var/lib/dflash"), LaunchOptions(job, "r1", changes))


def test_what_the_trainer_takes_is_planned(tmp_path: Path) -> None:
    assert planned(tmp_path, "mini", "optimizer.lr=1e-4").config["seed"] == 1
    assert planned(tmp_path, "file", "data.epochs=2").config["pipeline"]["targets"] == ["cuda:0"]


def test_of_other_code_only_the_container_can_tell(tmp_path: Path) -> None:
    assert planned(tmp_path, "own").config == {"anything": "goes"}


@pytest.mark.parametrize(
    ("job", "changes", "old", "new", "said", "cure"),
    [
        ("mini", [], "max_steps", "max_step", "inventory.yaml:10: unknown key `optimizer.max_step`", "`max_steps`?"),
        (
            "mini",
            [],
            "max_steps: 6",
            "max_steps: 0",
            "inventory.yaml:10: `optimizer.max_steps`: input should",
            "explain",
        ),
        ("mini", [], "sources: [/srv/chats.jsonl]", "seed: 1", "inventory.yaml:7: the configuration has no", "add it"),
        ("mini", ["data.seed=2"], "sources: [/srv/chats.jsonl]", "epochs: 1", "inventory.yaml:7: the conf", "add it"),
        ("mini", [], "seed: 1", "sed: 1", "inventory.yaml:12: `set` of job mini: unknown key `sed`", "`seed`?"),
        ("mini", ["optimizer.lrr=1"], "", "", "--set optimizer.lrr: unknown key `optimizer.lrr`", "`lr`?"),
        ("mini", ["seed=x"], "", "", "--set seed: `seed`: input should be a valid integer", "explain"),
        ("mini", ["optimizer=5"], "", "", "--set optimizer: `optimizer`:", "explain"),
        ("mini", ["chat.a=1"], "", "", "--set chat.a: unknown key `chat`", "known here: target, drafter"),
        (
            "file",
            [],
            "",
            "",
            "run.yaml:4: `data.epochs`: input should be greater than or equal to 1 (it is 0)",
            "explain",
        ),
    ],
)
def test_a_mistake_is_named_where_it_was_made(
    tmp_path: Path, job: str, changes: list[str], old: str, new: str, said: str, cure: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planned(tmp_path, job, *changes, old=old, new=new)
    assert caught.value.code == 78
    assert said in caught.value.message
    assert cure in caught.value.hint
    assert "\n" not in caught.value.message


def test_the_project_s_own_jobs_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    inventory = load_inventory(Path(__file__).parents[3] / "inventory.yaml")
    for job in inventory.jobs:
        container = (inventory.jobs[job].containers or ["lab"])[0]
        assert plan(inventory, container, RootPaths("/var/lib/dflash"), LaunchOptions(job, "r1")).config


def test_checking_loads_no_torch() -> None:
    code = "import sys, trainer.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
