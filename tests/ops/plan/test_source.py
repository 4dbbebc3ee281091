"""What of a folder is shipped: what git does not ignore, with or without git; the rest is named."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.plan import release, source
from dflash_ops.plan.release import pack
from dflash_ops.plan.source import choose
from tests.ops.packages import make_package


def git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=x", "-c", "user.email=x@example"]
    subprocess.run(["git", *own, "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture(params=["checkout", "checkout without git", "plain folder"])
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose ignore rules stand in it and, in a checkout, above it too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = make_package(tmp_path)
    (made / ".gitignore").write_text("*.log\n/data/\n!keep.log\nbuild\n")
    (made / "inner/.gitignore").write_text("!deep.log\n")
    if request.param != "plain folder":
        git(tmp_path, "init", "--quiet")
    if request.param == "checkout without git":
        monkeypatch.setattr(source, "_git", lambda folder, *words: None)
    return made


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


PLAIN = {"__main__.py", "empty.txt", "inner/日 $x.py"}


def test_what_git_ignores_stays_here_and_is_named(package: Path) -> None:
    write(package, "a.log", "keep.log", "inner/b.log", "inner/deep.log", "data/x.bin", "inner/data/y.bin", "build/z.so")
    chosen = choose(package)
    assert set(chosen.sizes) == PLAIN | {"keep.log", "inner/deep.log", "inner/data/y.bin"}
    assert sorted(chosen.ignored) == ["a.log", "build/", "data/", "inner/b.log"]
    assert chosen.hidden == []


def test_hidden_files_stay_here_and_are_named_unless_git_ignores_them(package: Path) -> None:
    write(package, ".env", ".config/a.json", "inner/.secret", ".cache.log", "__pycache__/x.pyc", "old.py~")
    chosen = choose(package)
    assert set(chosen.sizes) == PLAIN
    assert sorted(chosen.hidden) == [".config/", ".env", "inner/.secret"]
    assert chosen.ignored == [".cache.log"]


def test_include_ships_what_is_hidden_or_ignored(package: Path) -> None:
    write(package, ".env", ".config/a.json", ".config/b.txt", "data/x.bin", "data/y.bin", "data/deep/z.bin", "a.log")
    chosen = choose(package, [".env", ".config/*.json", "/data/**", "!y.bin"])
    assert set(chosen.sizes) == PLAIN | {".env", ".config/a.json", "data/x.bin", "data/deep/z.bin"}


def test_an_include_that_names_nothing_is_a_mistake(package: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"`include` names 'weihgts\.bin', which is not in"):
        choose(package, ["weihgts.bin"])


def test_the_rules_of_a_checkout_hold_for_a_folder_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_package(tmp_path)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    write(made, "x.bin", "y.txt")
    with_git = set(choose(made).sizes)
    monkeypatch.setattr(source, "_git", lambda folder, *words: None)
    assert with_git == set(choose(made).sizes) == PLAIN | {"y.txt"}


@pytest.mark.parametrize("has_git", [True, False])
def test_a_folder_that_its_checkout_ignores_is_packed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_git: bool
) -> None:
    made = make_package(tmp_path / ".venv/lib")
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("/.venv/\n*.txt\n")
    if not has_git:
        monkeypatch.setattr(source, "_git", lambda folder, *words: None)
    assert set(choose(made).sizes) == PLAIN


def test_a_file_that_is_tracked_is_shipped_though_a_rule_names_it(tmp_path: Path) -> None:
    made = make_package(tmp_path)
    git(made, "init", "--quiet")
    write(made, "weights.bin", "other.bin")
    git(made, "add", "weights.bin")
    (made / ".gitignore").write_text("*.bin\n")
    assert set(choose(made).sizes) == PLAIN | {"weights.bin"}


def test_another_checkout_within_has_its_own_rules(tmp_path: Path) -> None:
    made = make_package(tmp_path)
    git(made, "init", "--quiet")
    write(made, "module/a.py", "module/b.tmp", "b.tmp")
    git(made / "module", "init", "--quiet")
    (made / "module/.gitignore").write_text("*.tmp\n")
    assert set(choose(made).sizes) == PLAIN | {"module/a.py", "b.tmp"}


def test_git_s_own_variables_do_not_lead_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_package(tmp_path)
    git(made, "init", "--quiet")
    (made / ".gitignore").write_text("*.log\n")
    write(made, "a.log")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert choose(made).ignored == ["a.log"]


@pytest.mark.parametrize("kind", ["FIFO", "socket"])
def test_what_is_no_file_is_refused_by_its_kind_and_never_opened(package: Path, kind: str) -> None:
    path = package / "inner/odd"
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        here = os.open(package / "inner", os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/odd")  # a socket's path must be short
        os.close(here)
    with pytest.raises(ConfigurationError, match=rf"{path} is a {kind}, which cannot be shipped"):
        pack(package)
    path.rename(package / "odd.log")
    assert {file.path for file in pack(package).files} == PLAIN


def test_too_much_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_package(tmp_path)
    with (made / "model.safetensors").open("wb") as stream:
        stream.truncate(3 << 30)
    monkeypatch.setattr(release, "_describe", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ConfigurationError, match=r"more than 64 MiB; the largest file is 'model.safetensors', 3.0 GiB"):
        pack(made)
    monkeypatch.setattr(source, "MAX_FILES", 2)
    with pytest.raises(ConfigurationError, match="more than 2 files"):
        pack(made)


def test_a_main_module_that_git_ignores_is_said_to_be_so(package: Path) -> None:
    (package / ".gitignore").write_text("__main__.py\n")
    with pytest.raises(ConfigurationError, match=r"git ignores __main__\.py"):
        pack(package)
    assert "__main__.py" in {file.path for file in pack(package, ["__main__.py"]).files}


@pytest.mark.parametrize(
    ("mode", "executable", "private"),
    [(0o644, False, False), (0o755, True, False), (0o600, False, True), (0o700, True, True), (0o640, False, True)],
)
def test_the_mode_of_a_file_is_kept(tmp_path: Path, mode: int, executable: bool, private: bool) -> None:
    made = make_package(tmp_path)
    (made / "empty.txt").chmod(mode)
    file = next(file for file in pack(made).files if file.path == "empty.txt")
    assert (file.executable, file.private) == (executable, private)
    assert stat.S_IMODE((made / "empty.txt").stat().st_mode) == mode
