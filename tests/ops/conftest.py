"""What the tests of the launcher share; they leave nothing in the home of whoever runs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import Inventory
from dflash_ops.remote import systemd, which
from dflash_ops.transport.local import local_transport
from dflash_ops.verbs import reconnect
from dflash_ops.verbs.session import Session
from tests.ops import commands, jobs
from tests.ops.container import Container
from tests.ops.evidence import BOOT
from tests.ops.locked import UV, make_wheel
from tests.ops.sshd import server, sshd, via

__all__ = ["own_state_folder", "server", "sshd", "via"]


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    found = Container(tmp_path / "root")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(systemd, "boot_id", lambda: BOOT)
    monkeypatch.setattr(
        systemd, "show_units", lambda units, timeout=10, properties="": {unit: found.units[unit] for unit in units}
    )
    monkeypatch.setattr(which, "live_runs", found.live_runs)
    monkeypatch.setattr(reconnect.time, "sleep", lambda seconds: None)
    return found


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("")
    (tmp_path / "token").write_text("of a file\n")
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 0.002}\n")
    (tmp_path / "inventory.yaml").write_text(jobs.INVENTORY.replace("@folder@", str(tmp_path)))
    monkeypatch.setenv("CANARY", jobs.CANARY)
    return load_inventory(tmp_path / "inventory.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inventory.yaml").write_text(commands.INVENTORY.replace("@root@", str(tmp_path / "root")))
    (tmp_path / "empty").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("")
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    return folder / "log"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    if UV is not None:
        monkeypatch.setenv("PATH", f"{Path(UV).parent}:{os.environ['PATH']}")
    (tmp_path / "lock.txt").write_text("tiny-thing==1.0\n")
    (tmp_path / "bad.txt").write_text("no-such-thing==1.0\n")
    (tmp_path / "inventory.yaml").write_text(
        "containers: {here: {host: local}}\n"
        "environments:\n"
        "  there: {python: /opt/venv/bin/python}\n"
        f"  locked: {{lock: lock.txt, python: {sys.executable}}}\n"
        f"  bad: {{lock: bad.txt, python: {sys.executable}}}\n"
    )
    inventory = load_inventory(tmp_path / "inventory.yaml")
    return Session(inventory, "here", local_transport(), str(tmp_path / "root"), quiet=True)
