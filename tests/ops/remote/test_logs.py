"""The place in a log where the last lines, or a time, begin is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.remote import logs as remote_logs
from dflash_ops.verbs.logs import parse_since


@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("content", ["", "a\n", "a\nb\nc", "\n\n\n", "a\nbb\nccc\ndddd\n"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_the_last_lines_begin_where_they_should(
    log: Path, monkeypatch: pytest.MonkeyPatch, count: int, content: str, chunk: int
) -> None:
    monkeypatch.setattr(remote_logs, "CHUNK", chunk)
    log.write_text(content)
    with log.open("rb") as stream:
        begin = remote_logs.start_of_last_lines(stream, len(content), count)
    expected = content.splitlines(keepends=True)[-count:] if count else []
    assert content[begin:] == "".join(expected)


@pytest.mark.parametrize("second", range(-1, 12))
def test_since_begins_at_the_first_line_of_that_time(log: Path, second: int) -> None:
    lines = [f"2026-11-30T07:20:{i:02d}.500Z INFO main {i}\nTraceback {i}\n" for i in range(0, 10, 2)]
    content = "no stamp at all\n" + "".join(lines)
    log.write_text(content)
    moment = parse_since("2026-11-30T07:20:00Z") + second
    with log.open("rb") as stream:
        begin = remote_logs.start_since(stream, len(content), moment)
    assert content[begin:] == "".join(
        line
        for i, line in zip(range(0, 10, 2), lines, strict=True)
        if i + 0.5 >= moment - parse_since("2026-11-30T07:20:00Z")
    )
