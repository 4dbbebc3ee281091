"""The container measures CPU use only when it can."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dflash_ops.show import status as render
from dflash_ops.verbs.status import status
from tests.ops.container import Container, alive, shown


def test_a_damaged_record_does_not_hide_the_rest(container: Container) -> None:
    folder = container.run("r1", alive())
    (folder / "spec.json").write_text('{"run": ')
    answer = status(container.session(), "r1")
    assert (answer.state, answer.unreadable) == ("running", ("spec.json",))
    assert "spec.json is damaged" in shown(render.status_view(answer))


def test_cpu_use_is_given_only_when_it_could_be_measured(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", threading.Event().wait)  # for real
    container.run("r1", alive(os.getpid()))
    assert status(container.session(), "r1").cpu is None
    os.utime(container.root / "runs/r1/log", (time.time() - 60,) * 2)
    cpu = status(container.session(), "r1").cpu
    assert cpu is not None
    assert cpu.over >= 1
