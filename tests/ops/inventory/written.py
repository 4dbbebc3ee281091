"""A good inventory, and a folder to load one from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.load import load_inventory

GOOD = """\
hosts:
  pve1:
    address: pve1.example
containers:
  main:
    host: pve1
    container: 200
environments:
  venv:
    python: /opt/venv/bin/python
jobs:
  smoke:
    config: {target: {path: /srv/model}}
"""


def load(folder: Path, text: str | bytes) -> None:
    path = folder / "inventory.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    load_inventory(path)


def refused(folder: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, text)
    assert caught.value.code == 78
    assert "\n" not in caught.value.message
    return f"{caught.value.message} ({caught.value.hint})".replace(str(folder), "")
