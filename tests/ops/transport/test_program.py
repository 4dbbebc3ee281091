"""The command line is the same for all that is sent, means the same to every login shell, and runs nothing cut off."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

import dflash_ops.remote
from dflash_ops.transport.base import Program
from dflash_ops.transport.framing import FrameDecoder
from dflash_ops.transport.program import BOOTSTRAP, encode

REMOTE = Path(dflash_ops.remote.__file__).parent
LISTING = {"root": "/nonexistent/dflash", "do": "list"}


def sent(**request: object) -> bytes:
    return b"".join(encode(Program("env"), {**LISTING, **request}, 30))


def run(shell: str, stdin: bytes, command: str = BOOTSTRAP) -> bytes:
    done = subprocess.run([shell, "-c", command], input=stdin, capture_output=True, timeout=60, check=False)
    return done.stdout


def test_the_command_needs_no_quoting_in_any_shell() -> None:
    outer, inner, rest = BOOTSTRAP.split("'")
    assert (outer, rest) == ("/bin/sh -c ", "")
    assert not set("\\`!\n") & set(inner)
    assert len(BOOTSTRAP) < 1000


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh", "fish", "ksh", "tcsh", "busybox"])
def test_every_login_shell_runs_it_alike(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    command = [path, "sh"] if shell == "busybox" else [path]
    done = subprocess.run([*command, "-c", BOOTSTRAP], input=sent(), capture_output=True, timeout=60, check=False)
    assert list(FrameDecoder().feed(done.stdout)) == [("result", {"environments": [], "interpreters": {}})]
    assert done.stderr == b""


def test_a_program_says_first_of_all_that_it_began() -> None:
    decoder = FrameDecoder()
    first, _, rest = run("sh", sent()).lstrip().partition(b"\n")
    assert list(decoder.feed(first + b"\n")) == []
    assert decoder.started
    assert [kind for kind, _ in decoder.feed(rest)] == ["result"]


def test_a_cut_off_program_never_runs() -> None:
    whole = sent()
    header = whole.index(b"\n") + 1
    for length in (0, 1, header - 1, header, header + 1, header + 1000, len(whole) // 2, len(whole) - 1):
        assert b"@@DFLASH" not in run("sh", whole[:length]), f"it ran with {length} of {len(whole)} bytes"
    assert b"@@DFLASH" in run("sh", whole)


def test_a_changed_program_never_runs() -> None:
    whole = bytearray(sent())
    whole[-2] ^= 1
    assert b"@@DFLASH" not in run("sh", bytes(whole))


def test_without_python_the_shell_says_so() -> None:
    nowhere = BOOTSTRAP.replace("python3", "python3-that-is-nowhere")
    assert b"@@DFLASH no-python3" in run("sh", sent(), nowhere)


def test_nothing_of_the_user_is_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSTARTUP", "/nonexistent")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    assert b'"result"' in run("sh", sent(root="/x", note="$(id) 'quoted' \"double\" \n 😀"))


@pytest.mark.parametrize("path", sorted(REMOTE.glob("*.py")), ids=lambda path: path.name)
def test_remote_programs_are_python_3_8(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module).split(".")[0])
            if node.module == "datetime":
                assert "UTC" not in {alias.name for alias in node.names}, "datetime.UTC is Python 3.11"
    import sys

    assert modules <= set(sys.stdlib_module_names) | {"dflash_ops"}


def test_a_fault_of_the_program_tells_its_line() -> None:
    body = b"".join(encode(Program("env"), {}, 30))
    ((kind, value),) = FrameDecoder().feed(run("sh", body))
    assert (kind, value["code"], value["message"]) == ("error", 70, "KeyError: 'do'")
    assert 'File "<shipped>/dflash_ops/remote/env.py", line' in value["detail"]
    assert 'request["do"]' in value["detail"]
