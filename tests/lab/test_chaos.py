"""Tests a few cells of the table of faults that `make chaos` tries in full."""

from __future__ import annotations

import pytest

from tests.lab.chaos import cells, try_cell
from tests.lab.lab import Lab

pytestmark = pytest.mark.lab

CELLS = [
    ("client SIGKILLed", "kill", "middle"),
    ("sshd killed", "launch", "middle"),
    ("sshd killed", "follow", "middle"),
    ("sshd killed", "pull", "middle"),
    ("peer vanished", "launch", "middle"),
    ("container restarted", "launch", "middle"),
    ("container stopped", "kill", "middle"),
    ("container frozen", "kill", "middle"),
    ("disk full", "follow", "middle"),
    ("log deleted", "follow", "middle"),
    ("unit SIGKILLed", "launch", "after"),
    ("recorder fails", "kill", "before"),
    ("recorder fails", "follow", "before"),
    ("clock an hour on", "follow", "middle"),
    ("clock an hour back", "kill", "before"),
    ("unit name taken", "launch", "before"),
]


@pytest.mark.parametrize(("fault", "verb", "phase"), CELLS)
def test_every_promise_is_kept(lab: Lab, fault: str, verb: str, phase: str) -> None:
    assert (fault, verb, phase) in cells()
    outcome = try_cell(lab, fault, verb, phase)
    assert outcome.broken == []
