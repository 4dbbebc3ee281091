"""A release is its contents: same files, same name; in the container it is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.plan.release import pack, trainer_source
from tests.ops.packages import make_package


def test_the_name_follows_the_contents_and_nothing_else(tmp_path: Path) -> None:
    first = pack(make_package(tmp_path / "a"))
    copy = make_package(tmp_path / "b")
    os.utime(copy / "__main__.py", (0, 0))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__/x.pyc").write_text("x")
    (copy / ".hidden").write_text("x")
    (copy / "notes.txt~").write_text("x")
    assert pack(copy).name == first.name
    (copy / "__main__.py").write_text("print('other')\n")
    assert pack(copy).name != first.name


def test_mode_and_path_are_part_of_the_name(tmp_path: Path) -> None:
    source = make_package(tmp_path)
    plain = pack(source).name
    (source / "empty.txt").chmod(0o755)
    executable = pack(source).name
    (source / "empty.txt").rename(source / "renamed.txt")
    assert len({plain, executable, pack(source).name}) == 3


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda source: (source / "link.py").symlink_to("/etc/passwd"), "symbolic link"),
        (lambda source: (source / "folder").symlink_to("/etc"), "symbolic link"),
        (lambda source: (source / "a\nb.py").write_text("x"), "control characters"),
        (lambda source: (source / "__main__.py").unlink(), "no __main__.py"),
        (lambda source: Path(os.fsdecode(os.fsencode(source) + b"/\xff.py")).write_text("x"), "not UTF-8"),
    ],
)
def test_what_cannot_be_shipped_is_refused_by_name(tmp_path: Path, spoil: Any, said: str) -> None:
    source = make_package(tmp_path)
    spoil(source)
    with pytest.raises(ConfigurationError, match=said):
        pack(source)


def test_the_trainer_beside_dflash_can_be_shipped() -> None:
    release = pack(trainer_source())
    assert "__main__.py" in {file.path for file in release.files}
