"""Standard streams stay usable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.commands import CANARY, dflash


def test_a_reader_that_has_enough_ends_it_quietly(folder: Path) -> None:
    config = "{" + ", ".join(f"key{index}: {'x' * 100}" for index in range(5000)) + "}"
    text = (folder / "inventory.yaml").read_text().replace("{a: 1}", config)
    (folder / "inventory.yaml").write_text(text)
    command = f"{sys.executable} -m dflash_ops.main launch --dry-run | head -1"
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml")}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("run ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code"),
    [(["launch", "--dry-run"], 0), (["runs", "--container", "here"], 0), (["kill", "-y", "--json"], 69)],
)
def test_without_a_reader_it_ends_quietly_and_with_its_own_exit_code(folder: Path, words: list[str], code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml")}
    command = [sys.executable, "-m", "dflash_ops.main", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, env=environment, timeout=60)
    os.close(write)
    assert done.returncode == code
    assert b"BrokenPipe" not in done.stderr


def test_closed_streams_change_neither_what_is_done_nor_the_exit_code(folder: Path) -> None:
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml")}
    for verb, code in (("kill -y", 69), ("runs --container here", 0), ("kill", 69)):
        command = f"{sys.executable} -m dflash_ops.main {verb} <&- >&- 2>&-"
        assert subprocess.run(["sh", "-c", command], check=False, env=environment, timeout=60).returncode == code


def test_what_a_terminal_s_encoding_lacks_is_spelled_out(folder: Path) -> None:
    inventory = folder / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace("/opt/venv/bin", "/opt/日/bin"))
    done = dflash(folder, "launch", "--dry-run", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "/opt/\\u65e5/bin/python" in done.stdout
