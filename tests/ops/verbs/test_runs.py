"""`dflash runs` lists runs with their verdicts."""

from __future__ import annotations

import json
import os

from dflash_ops.show import tables
from dflash_ops.verbs.runs import runs
from tests.ops.container import ABSENT, Container, alive, ended, shown


def test_runs_lists_the_newest_first_with_verdicts(container: Container) -> None:
    container.run("a", ABSENT, exit=ended("success", "exited", "0"))
    os.utime(container.root / "runs/a/spec.json", (1, 1))
    container.run(
        "b", ABSENT, started={**json.loads((container.root / "runs/a/started.json").read_text()), "boot_id": "x"}
    )
    os.utime(container.root / "runs/b/spec.json", (2, 2))
    container.run("c", alive())
    session = container.session()
    answer = runs(session, 2)
    assert [(one.run, one.state) for one in answer.runs] == [("c", "running"), ("b", "lost")]
    assert (answer.total, session.transport.round_trips) == (3, 1)
    assert "restarted" in shown(tables.runs_view(answer, 200))
