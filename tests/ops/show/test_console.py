"""Piped answers are not padded."""

from __future__ import annotations

import pytest

from dflash_ops.show import status as render
from dflash_ops.show import tables
from dflash_ops.verbs.runs import runs
from dflash_ops.verbs.status import status
from tests.ops.container import Container, alive


def test_piped_answers_end_where_their_text_does(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    container.run("r1", alive())
    render.show_status(status(container.session(), "r1"))
    tables.show_runs(runs(container.session(), 5))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []
