"""A wheel of nothing."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str = "tiny_thing", version: str = "1.0") -> None:
    """A wheel of one module, so that no package index is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "value = 42\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
