"""Programs run on this machine, beside a made-up run."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.local import LocalHost
from dflash_ops.transport.program import BOOTSTRAP


def transport(command: str = BOOTSTRAP) -> FramedTransport:
    return FramedTransport(LocalHost(), command, lambda text, status: None)


def make_run(root: Path, env: str = "") -> None:
    """A run that `execute` can work in."""
    run = root / "runs" / "r1"
    run.mkdir(parents=True)
    (root / "releases" / ("a" * 32)).mkdir(parents=True)
    (run / "env").write_text(env)
    (run / "spec.json").write_text(json.dumps({"release": "a" * 32, "python": "/usr/bin/python3"}))
