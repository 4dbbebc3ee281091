"""`dflash wait` ends with the run's state."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ops.errors import Exit
from dflash_ops.show import answers
from dflash_ops.verbs.wait import WaitOptions, wait
from tests.ops.container import ABSENT, WELL, Container, alive, ended


@pytest.mark.parametrize(
    ("goal", "unit", "steps", "exit_", "code"),
    [
        ("started", alive(), 0, None, Exit.OK),
        ("step", alive(), 1, None, Exit.OK),
        ("finished", ABSENT, 3, ended("success", "exited", "0"), Exit.OK),
        ("step", ABSENT, 0, ended("exit-code", "exited", "1"), Exit.RUN_FAILED),
        ("finished", ABSENT, 3, ended("success", "killed", "TERM"), Exit.RUN_LOST),
    ],
)
def test_wait_ends_with_the_runs_state_as_exit_code(
    container: Container, goal: Any, unit: dict[str, str], steps: int, exit_: dict[str, Any] | None, code: Exit
) -> None:
    container.run("r1", unit, steps=steps, **({"exit": exit_} if exit_ else {}))
    assert wait(container.session(), WaitOptions("r1", goal)).exit_code == code


def test_wait_sees_the_first_step_come(container: Container) -> None:
    folder = container.run("r1", alive(), steps=0)
    session = container.session(polls=[lambda: None, lambda: container.write_steps(folder, 1)])
    answer = wait(session, WaitOptions("r1", "step"))
    assert (answer.reached, answer.status.state) == (True, "running")


def test_wait_gives_up_at_its_timeout_and_says_not_finished(container: Container) -> None:
    container.run("r1", alive())
    answer = wait(container.session(), WaitOptions("r1", "finished", timeout=0.0))
    assert (answer.reached, answer.exit_code) == (False, Exit.RUN_NOT_FINISHED)


def test_wait_says_the_end_once(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", ABSENT, exit=WELL)
    session = container.session()
    session.quiet = False
    answers.show_wait(wait(session, WaitOptions("r1")))
    seen = capsys.readouterr()
    assert (seen.out.count("succeeded"), seen.err) == (1, "")
