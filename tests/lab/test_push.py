"""Files come into a real container whole, however often who sends them is killed."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import pytest

from tests.lab import faults
from tests.lab.lab import Lab, wait_for
from tests.lab.user import Dflash

pytestmark = pytest.mark.lab


# Carries the connection, at six megabytes a second: so half-way is a state that a test can meet.
SLOW_LINE = """
import os, select, socket, sys, time
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    ready, _, _ = select.select([0, line], [], [])
    if line in ready:
        data = line.recv(65536)
        os.write(1, data)
    else:
        data = os.read(0, 65536)
        line.sendall(data)
        time.sleep(len(data) / 6e6)
    if not data:
        break
"""


def slow_line(dflash: Dflash) -> None:
    (dflash.folder / "line.py").write_text(SLOW_LINE)
    (dflash.folder / "ssh_config").write_text(f"ProxyCommand {sys.executable} {dflash.folder / 'line.py'} %h %p\n")
    dflash.inventory["hosts"]["node"]["ssh_config"] = str(dflash.folder / "ssh_config")


def sha256(lab: Lab, path: str) -> str:
    return lab.container("sha256sum", path).stdout.split()[0]


def test_a_push_that_is_killed_half_way_goes_on_where_it_stopped(lab: Lab, dflash: Dflash) -> None:
    model = dflash.folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "weights.safetensors"
    weights.write_bytes(os.urandom(24 << 20))
    to = f"{dflash.root}/models"

    def came() -> int:
        command = f"cat {to}/*.partial/weights.safetensors | wc -c"
        return int(lab.container("sh", "-c", command, check=False).stdout)

    ordinary = dict(dflash.inventory["hosts"]["node"])
    slow_line(dflash)
    before = 0
    for how in (signal.SIGKILL, signal.SIGINT):
        pushing = dflash.start("push", str(model), "--to", to)
        wait_for("more of it has come", lambda: came() > before + (2 << 20), 60)  # noqa: B023
        pushing.send_signal(how)
        _, err = pushing.communicate(timeout=30)
        assert pushing.returncode in (-signal.SIGKILL, 130), err
        assert lab.container("ls", to).stdout.strip().endswith(".partial")
        before = came()
    assert "the same `dflash push` goes on" in err

    dflash.inventory["hosts"]["node"] = ordinary
    pushed = dflash.json("push", str(model), "--to", to)
    assert (pushed["kind"], pushed["files"]) == ("push", ["model/config.json", "model/weights.safetensors"])
    assert 0 < pushed["sent"] < 20 << 20
    assert lab.container("ls", to).stdout.split() == ["model"]
    assert sha256(lab, f"{to}/model/weights.safetensors") == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert lab.container("stat", "-c", "%a %U", f"{to}/model/weights.safetensors").stdout.split() == ["644", "root"]
    assert dflash.json("push", str(model), "--to", to)["sent"] == 0


def test_a_container_without_room_says_so_before_a_byte_is_sent(lab: Lab, dflash: Dflash) -> None:
    (dflash.folder / "large").write_bytes(bytes(8 << 20))
    with faults.small_disk(lab, dflash.root, 4):
        refused = dflash("push", str(dflash.folder / "large"), code=78)
        assert "8.0 MiB are to come" in refused.stderr
        assert lab.container("find", dflash.root, "-type", "f").stdout == ""
