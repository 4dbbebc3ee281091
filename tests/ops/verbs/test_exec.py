"""`dflash exec` passes arguments and both outputs on, and ends with its connection."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_ops.transport.base import (
    Program,
)
from tests.ops.local import make_run, transport


def execute(root: Path, *argv: str) -> Iterator[Any]:
    return transport().stream(Program("exec"), {"root": str(root), "run": "r1", "argv": list(argv)})


def test_arguments_of_any_shape_arrive_unchanged(tmp_path: Path) -> None:
    nasty = [
        "a b",
        "'",
        '"',
        "$HOME",
        "`id`",
        "$(id)",
        "%n",
        "\\",
        "\n",
        "\t\r",
        "",
        "--",
        "-x",
        "*",
        "é日😀",
        "=ls",
        "!1",
    ]
    make_run(tmp_path)
    *events, result = execute(tmp_path, "python3", "-c", "import sys,json;print(json.dumps(sys.argv[1:]))", *nasty)
    out = b"".join(frame.value["data"] for frame in events)
    assert json.loads(out) == nasty
    assert result.value == {"run": "r1", "status": 0}


def test_megabytes_on_both_outputs_at_once_do_not_block_each_other(tmp_path: Path) -> None:
    make_run(tmp_path)
    script = "import sys\nfor _ in range(40):\n sys.stdout.write('o'*65536); sys.stderr.write('e'*65536)"
    sizes = {"out": 0, "err": 0}
    for frame in execute(tmp_path, "python3", "-c", script):
        if frame.kind == "event":
            sizes[frame.value["to"]] += len(frame.value["data"])
    assert sizes == {"out": 40 * 65536, "err": 40 * 65536}


def test_closing_a_stream_ends_the_program_and_what_it_runs(tmp_path: Path) -> None:
    make_run(tmp_path)
    frames = execute(tmp_path, "sh", "-c", f"echo $$ > {tmp_path}/pid; echo ready; exec sleep 300")
    next(frames)
    pid = int((tmp_path / "pid").read_text())
    frames.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
