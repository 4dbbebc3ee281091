"""The command line: what it prints where, its exit codes, and that an error is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ops.commands import CANARY, dflash, exit_code


def test_ctrl_c_after_a_key_was_taken_says_where_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = SimpleNamespace(host="main", kind="ssh-ed25519", fingerprint="SHA256:x", known_hosts="/k")
    for taken, words in ((False, "nothing was changed"), (True, "the key of main is in /k")):

        def trust(inventory: object, host: str, ask: Callable[[object], bool], taken: bool = taken) -> None:
            if taken:
                ask(key)
            raise KeyboardInterrupt

        monkeypatch.setattr("dflash_ops.verbs.trust.trust", trust)
        assert exit_code(folder, monkeypatch, "trust", "main", "-y") == 130
        assert capsys.readouterr().err.endswith(f"interrupted: {words}\n")


def test_help_names_the_defaults_and_what_may_be_given(folder: Path) -> None:
    launch, pull = (" ".join(dflash(folder, verb, "-h", COLUMNS="80").stdout.split()) for verb in ("launch", "pull"))
    assert "default: the job's" in launch
    assert "[[" not in launch + pull
    assert "checkpoints, metrics, log or all" in pull
    assert dflash(folder).stdout.count("Usage:") == 1
    assert "Value error" not in dflash(folder, "launch", "--wait", "x").stderr
    assert dflash(folder, "--version").stdout.startswith("dflash ")


def test_a_broken_inventory_is_a_configuration_error(folder: Path) -> None:
    (folder / "inventory.yaml").write_text("containers: [")
    done = dflash(folder, "launch")
    assert done.returncode == 78
    assert "inventory.yaml:1" in done.stderr


def test_a_dry_run_shows_all_but_the_secrets_and_connects_to_nothing(folder: Path) -> None:
    for words in (["launch", "--dry-run"], ["launch", "--dry-run", "--json"]):
        done = dflash(folder, *words)
        assert done.returncode == 0, done.stderr
        assert "TOKEN" in done.stdout
        assert CANARY not in done.stdout + done.stderr
        assert "systemd-run" in done.stdout
    assert json.loads(done.stdout)["spec"]["config"] == {"a": 1}


def test_a_dry_run_lists_the_files_that_are_shipped_and_those_that_are_not(folder: Path) -> None:
    package = folder / "package"
    (package / ".gitignore").write_text("*.log\n")
    (package / ".env").write_text("x")
    (package / "a.log").write_text("x")
    (package / "weights.bin").write_bytes(b"x" * 2048)
    done = dflash(folder, "launch", "--dry-run")
    listed = [line.split(maxsplit=2) for line in done.stdout.split("--- release: ")[1].splitlines()]
    assert listed == [
        ["2", "files,", "2.0 KiB"],
        ["0", "B", "__main__.py"],
        ["2.0", "KiB", "weights.bin"],
        ["left", "out", "a.log  (git ignores it)"],
        ["left", "out", ".env  (hidden)"],
    ]
    told = json.loads(dflash(folder, "launch", "--dry-run", "--json").stdout)["release"]
    assert [(file["path"], file["size"]) for file in told["files"]] == [("__main__.py", 0), ("weights.bin", 2048)]
    assert (told["hidden"], told["ignored"]) == ([".env"], ["a.log"])


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['dflash', '--help']\n"
        "from dflash_ops.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = ('fabric', 'paramiko', 'pydantic', 'yaml', 'torch', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
