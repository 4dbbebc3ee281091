"""A snapshot of any form is read, or refused in a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_ops.show import status as render
from dflash_ops.transport.base import BadAnswer
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import status
from tests.ops.container import HOSTILE, Container, alive, shown
from tests.ops.evidence import INVENTORY


@pytest.mark.parametrize(
    "change",
    [
        {"run": HOSTILE},
        {"run": "../r1"},
        {"checkpoints": [{"name": HOSTILE, "step": 1, "time": 1.0}]},
        {"time": float("inf")},
        {"time": float("nan")},
        {"time": 1e18},
    ],
)
def test_a_probe_that_answers_nonsense_is_refused_in_a_sentence(container: Container, change: dict[str, Any]) -> None:
    container.run("r1", alive())
    value = container.session().call("status", {"run": "r1"}).value
    session = Session(INVENTORY, "lab", FakeTransport({"status": [{**value, **change}]}), quiet=True)
    with pytest.raises(BadAnswer):
        status(session, "r1")


def test_a_record_with_an_impossible_time_or_a_giant_step_is_damage_and_not_a_crash(container: Container) -> None:
    folder = container.run("r1", alive())
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**spec, "created": 1e300}))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 10**400, "total_steps": 1}) + "\n")
    answer = status(container.session(), "r1")
    assert (answer.state, answer.unreadable, answer.progress) == ("running", ("spec.json",), None)
    assert "spec.json is damaged" in shown(render.status_view(answer))


def test_progress_that_the_container_words_cannot_steer_the_terminal(
    container: Container, capsys: pytest.CaptureFixture[str]
) -> None:
    Session(INVENTORY, "lab", FakeTransport({})).say(f"\n  waiting, {HOSTILE} s")
    assert capsys.readouterr().err == "\n  waiting, \\x1b]0;title\\x07\\x1b[2J s\n"


def test_an_answer_in_another_form_is_refused(container: Container) -> None:
    odd = Session(INVENTORY, "lab", FakeTransport({"status": [{"run": "r1", "time": "soon"}]}))
    with pytest.raises(BadAnswer):
        status(odd, "r1")
