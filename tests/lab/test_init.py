"""A host's first inventory comes out of the host itself: asked for on a terminal, or by options."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
import yaml

from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import ContainerEntry
from dflash_ops.transport.pct import sudoers_line
from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.user import PYTHON, Dflash

pytestmark = pytest.mark.lab


def command(dflash: Dflash, inventory: Path, *words: str, user: str = "root") -> list[str]:
    """`dflash init` with an inventory that has the host alone: ssh's client looks for known_hosts in the real home."""
    if not inventory.exists():
        host = {**dflash.inventory["hosts"]["node"], "user": user, "known_hosts": str(known_hosts(dflash))}
        if user != "root":
            host["sudo"] = True
        inventory.write_text(yaml.safe_dump({"hosts": {"node": host}}) + "containers: {}\n")
    return [str(PYTHON), "-m", "dflash_ops.main", "--inventory", str(inventory), "init", "node", *words]


def known_hosts(dflash: Dflash) -> Path:
    return dflash.folder / "known"


def typed(dflash: Dflash, argv: list[str], answers: str) -> tuple[int, str, str]:
    """Exit code, stdout, and what the terminal showed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        argv, env=dflash.env(), cwd=dflash.folder, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        os.write(ours, answers.encode())
        assert process.stdout is not None
        out = process.stdout.read()
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:  # the terminal's other end is closed
            pass
        os.close(ours)
        return process.wait(60), out, shown.decode()


def test_init_without_a_terminal_needs_its_decisions_as_options(lab: Lab, dflash: Dflash) -> None:
    inventory = dflash.folder / "new.yaml"
    bare = subprocess.run(
        command(dflash, inventory), env=dflash.env(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (bare.returncode, "no terminal to ask on" in bare.stderr) == (2, True)
    assert not known_hosts(dflash).exists()
    assert inventory.read_text().endswith("containers: {}\n")

    words = ("--yes", "--python", str(PYTHON), "--json")
    done = subprocess.run(command(dflash, inventory, *words), env=dflash.env(), capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (answer["kind"], answer["containers"]) == ("init", ["ct200"]), done.stderr
    assert [(each["vmid"], each["status"]) for each in answer["found"]] == [(200, "running"), (201, "stopped")]
    (python,) = answer["found"][0]["inside"]["pythons"]
    assert (python["path"], python["torch"] is not None) == (str(PYTHON), True)
    assert answer["added"] == ["containers.ct200", "environments.ct200"]
    assert {line["topic"]: line["level"] for line in answer["doctor"][0]["lines"]}["import"] == "ok"
    assert f"[127.0.0.1]:{lab.port} ssh-ed25519" in known_hosts(dflash).read_text()
    assert load_inventory(inventory).container(None)[1].container == 200

    runs = [str(PYTHON), "-m", "dflash_ops.main", "--inventory", str(inventory), "runs", "--json"]
    assert json.loads(subprocess.run(runs, env=dflash.env(), capture_output=True).stdout)["kind"] == "runs"

    before = inventory.read_text()
    words = ("-c", "201", "--yes", "--json")
    again = subprocess.run(command(dflash, inventory, *words), env=dflash.env(), capture_output=True, text=True)
    answer = json.loads(again.stdout)
    assert (answer["added"], again.returncode) == (["containers.ct201"], 78)
    assert "stopped" in again.stdout
    assert inventory.read_text().startswith(before.partition("containers:")[0])
    assert load_inventory(inventory).container(None)[1].container == 200  # the default is the same as before


def test_init_as_a_user_who_may_only_enter_one_container_takes_its_number(lab: Lab, dflash: Dflash) -> None:
    inventory = dflash.folder / "sudo.yaml"
    line = sudoers_line(ContainerEntry(host="node", container=200), "operator3")
    with faults.user(lab, "operator3", line):
        bare = subprocess.run(
            command(dflash, inventory, "--yes", user="operator3"), env=dflash.env(), capture_output=True, text=True
        )
        assert (bare.returncode, "--container NUMBER" in bare.stderr) == (77, True), bare.stderr
        words = command(dflash, inventory, "--yes", "-c", "200", "--json", user="operator3")
        done = subprocess.run(words, env=dflash.env(), capture_output=True, text=True)
        assert json.loads(done.stdout)["containers"] == ["ct200"], done.stderr
    assert load_inventory(inventory).containers["ct200"].container == 200


def test_init_on_a_terminal_asks_which_container_and_which_python(dflash: Dflash) -> None:
    inventory = dflash.folder / "asked.yaml"
    code, _, shown = typed(dflash, command(dflash, inventory), "n\n")
    assert (code, "nothing was done" in shown, load_inventory(inventory).containers == {}) == (0, True, True)
    code, out, shown = typed(dflash, command(dflash, inventory), "y\n7\n200\n99\n1\n")
    assert "Is that its fingerprint" in shown
    assert "choose from 200, 201" in shown
    assert "choose from 0 to" in shown
    written = load_inventory(inventory)
    assert [entry.container for entry in written.containers.values()] == [200]
    [environment] = written.environments.values()
    assert f"{environment.python}: 3." in shown
    assert "ct200: " in out
    assert code in (0, 78)  # as doctor says: that python may have no torch
