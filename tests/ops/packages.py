"""A package folder to ship."""

from __future__ import annotations

from pathlib import Path


def make_package(folder: Path, text: str = "print('hello')\n") -> Path:
    source = folder / "package"
    (source / "inner").mkdir(parents=True, exist_ok=True)
    (source / "__main__.py").write_text(text)
    (source / "inner/日 $x.py").write_text("x = 1\n")
    (source / "empty.txt").write_text("")
    return source
