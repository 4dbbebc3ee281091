"""Runs `dflash` as a program, or its entry point in this process."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_ops.main import main

INVENTORY = """\
hosts:
  main: {address: 127.0.0.1, port: 1, user: nobody, ssh_config: empty, known_hosts: known}
containers:
  far: {host: main, container: 200}
  here: {host: local, root: @root@}
default_container: far
environments: {venv: {python: /opt/venv/bin/python}}
jobs:
  smoke: {config: {a: 1}, source: package, env: {TOKEN: env:CANARY}}
"""
CANARY = "s3cr3t-canary"


def dflash(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CANARY": CANARY, "DFLASH_INVENTORY": str(folder / "inventory.yaml"), **variables}
    command = [sys.executable, "-m", "dflash_ops.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )


def exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The same in this process: a new one takes half a second."""
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("DFLASH_INVENTORY", str(folder / "inventory.yaml"))
    monkeypatch.setattr(sys, "argv", ["dflash", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def called(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[], object], name: str = "dflash_ops.verbs.runs.runs"
) -> int:
    """The exit code when the work of `runs` is `verb`."""
    monkeypatch.setattr(name, lambda *_: verb())
    return exit_code(folder, monkeypatch, "runs", "--container", "here")
