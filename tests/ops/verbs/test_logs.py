"""A followed log is shown byte for byte, whatever is cut, truncated, replaced or deleted meanwhile."""

from __future__ import annotations

import io
import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dflash_ops.errors import UsageError
from dflash_ops.remote import logs as remote_logs
from dflash_ops.remote import status as remote_status
from dflash_ops.remote.lines import last_segment
from dflash_ops.text import decoded, visible
from dflash_ops.transport.base import BadAnswer
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs import logs
from dflash_ops.verbs import reconnect as live
from dflash_ops.verbs.logs import Folder, TailOptions, parse_since, tail
from dflash_ops.verbs.session import Session
from tests.ops.evidence import INVENTORY
from tests.ops.inprocess import InProcess

END = {
    "run": "r1",
    "time": 100.0,
    "monotonic": 50.0,
    "boot_id": "b",
    "age": 10.0,
    "unit": {"kind": "shown", "properties": {"LoadState": "not-found"}},
    "records": {"unreadable": []},
    "log": {"kind": "missing"},
    "disk": None,
    "metrics": {"mtime": None, "steps": [], "last": None},
    "checkpoints": [],
    "gpu": None,
    "cpu": None,
}


@pytest.fixture(autouse=True)
def no_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run goes on while the test has something left to do, and ends then."""
    monkeypatch.setattr(remote_status, "snapshot", lambda paths, request: END)
    monkeypatch.setattr(remote_logs, "_UNIT_EVERY", 0.0)
    monkeypatch.setattr(live.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def shown(transport: InProcess, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, list[str]]:
    """What is printed, and what is said beside it."""
    monkeypatch.setattr(remote_status, "state", lambda paths: {})
    monkeypatch.setattr(remote_status, "over", lambda seen: not transport.polls)
    session = Session(INVENTORY, "lab", transport, str(transport.root))
    said: list[str] = []
    session.say = said.append  # type: ignore[method-assign]
    out = io.StringIO()
    tail(session, TailOptions(**{"run": "r1", **options}), out)
    return out.getvalue(), said


def reference(data: bytes) -> str:
    """What must be shown of a whole log."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return "".join(visible(last_segment(decoded(line))) + "\n" for line in lines)


CONTENT = st.lists(
    st.sampled_from(
        [b"a", b"loss 3.21", b"\n", b"\r", b"\r\n", "日本".encode(), b"\xff", b"\x1b[31m", b"\x1b[2J", b"\xe6"]
    ),
    max_size=40,
).map(b"".join)


@given(CONTENT, st.integers(1, 9))
def test_pieces_of_any_size_show_what_the_whole_shows(data: bytes, size: int) -> None:
    folder = Folder()
    pieces = [folder.feed(data[i : i + size]) for i in range(0, len(data), size)]
    assert "".join(pieces) + folder.finish() == reference(data)


@settings(max_examples=60, deadline=None)
@given(data=CONTENT, chunk=st.integers(1, 9), cuts=st.lists(st.integers(1, 12), max_size=8), grow=CONTENT)
def test_cuts_anywhere_lose_and_repeat_nothing(
    data: bytes, chunk: int, cuts: list[int], grow: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    path = root / "runs" / "r1" / "log"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)

    def write() -> None:
        with path.open("ab") as stream:
            stream.write(grow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_logs, "CHUNK", chunk)
        transport = InProcess(root, cuts, {1: write, 2: write}, [write])
        text, _ = shown(transport, patch)
        assert text == reference(path.read_bytes())


def test_a_cut_after_every_single_frame_loses_and_repeats_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(b"2026-11-30T07:20:%02d.000Z INFO main step %d\n" % (i % 60, i) for i in range(20))
    log.write_bytes(data)
    monkeypatch.setattr(remote_logs, "CHUNK", 11)
    frames = len(data) // 11 + 4
    for cut in range(1, frames):
        text, said = shown(InProcess(log.parents[2], [cut]), monkeypatch)
        assert text == data.decode()
        assert any("trying again" in line for line in said)


def test_a_log_that_appears_only_after_the_connection_broke_is_shown_from_its_first_byte(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear() -> None:
        log.write_text("first\nsecond\nthird\n")

    # Frames: run, caught_up; then the connection breaks. -n 1 must not cut what was written since.
    transport = InProcess(log.parents[2], [2], {1: appear}, [lambda: None])
    assert shown(transport, monkeypatch, lines=1)[0] == "first\nsecond\nthird\n"


def test_the_last_lines_are_chosen_once_and_then_everything_is_followed(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write_text("one\ntwo\nthree\n")

    def grow() -> None:
        with log.open("a") as stream:
            stream.write("four\nfive\n")

    text, _ = shown(InProcess(log.parents[2], polls=[grow]), monkeypatch, lines=1)
    assert text == "three\nfour\nfive\n"


def test_truncation_is_noticed_and_the_new_content_shown(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("old old old\n")
    text, said = shown(InProcess(log.parents[2], polls=[lambda: log.write_text("new\n") and None]), monkeypatch)
    assert text == "old old old\nnew\n"
    assert said == ["-- the log was truncated and written anew; it is shown from its beginning"]


def test_a_log_that_was_truncated_and_has_grown_past_our_place_is_noticed(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copytruncate between two looks: the file is longer than before, and nothing but its content tells."""
    log.write_text("old old old\n")
    fresh = "".join(f"new line {number}\n" for number in range(800))
    text, said = shown(InProcess(log.parents[2], polls=[lambda: log.write_text(fresh) and None]), monkeypatch)
    assert text == "old old old\n" + fresh
    assert said == ["-- the log was truncated and written anew; it is shown from its beginning"]


def test_a_hole_of_nuls_is_counted_not_printed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_bytes(b"before\n" + bytes(100_000) + b"after\n")
    text, _ = shown(InProcess(log.parents[2], polls=[]), monkeypatch)
    assert text == "before\n[100000 NUL bytes]after\n"


def test_rotation_shows_the_end_of_the_old_file_and_then_the_new_one(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write_text("one\n")

    def rotate() -> None:
        with log.open("a") as stream:
            stream.write("last words\n")
        log.rename(log.with_name("log.1"))
        log.write_text("new file\n")

    text, said = shown(InProcess(log.parents[2], polls=[rotate]), monkeypatch)
    assert text == "one\nlast words\nnew file\n"
    assert said == ["-- the log was replaced by a new file, which is shown from its beginning"]


def test_a_rotation_while_the_connection_was_down_loses_no_byte(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("one\n")

    def rotate() -> None:
        with log.open("a") as stream:
            stream.write("last words\n")
        log.rename(log.with_name("log.1"))
        log.write_text("new file\n")

    transport = InProcess(log.parents[2], [4], {1: rotate}, [lambda: None, lambda: None])
    assert shown(transport, monkeypatch)[0] == "one\nlast words\nnew file\n"


def test_a_deleted_log_is_followed_on_through_its_open_file(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("one\n")
    writer = os.open(log, os.O_WRONLY | os.O_APPEND)
    text, said = shown(
        InProcess(log.parents[2], polls=[log.unlink, lambda: os.write(writer, b"still here\n") and None]),
        monkeypatch,
    )
    os.close(writer)
    assert text == "one\nstill here\n"
    assert len(said) == 1
    assert "deleted" in said[0]


def test_an_unfinished_last_line_is_shown_at_the_end(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("one\nno newline")
    assert shown(InProcess(log.parents[2]), monkeypatch)[0] == "one\nno newline\n"


def test_no_follow_shows_what_is_there_and_returns(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("one\n")
    transport = InProcess(log.parents[2], polls=[lambda: pytest.fail("it waited")])
    assert shown(transport, monkeypatch, follow=False)[0] == "one\n"


def test_grep_with_lines_shows_the_last_matches(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("".join(f"{'loss' if i % 2 else 'noise'} {i}\n" for i in range(20)))
    text, _ = shown(InProcess(log.parents[2]), monkeypatch, lines=2, grep=re.compile("loss"))
    assert text == "loss 17\nloss 19\n"


def test_escape_sequences_in_a_log_do_not_reach_the_terminal() -> None:
    folder = Folder()
    text = folder.feed(b"\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m\x9b5n \xc2\x9b ok\n")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "red" in text


def test_a_line_that_never_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LONGEST_LINE", 100)
    folder = Folder()
    data = ("日" * 500).encode()
    text = "".join(folder.feed(data[i : i + 7]) for i in range(0, len(data), 7))
    assert len(folder.partial()) <= 100
    assert text + folder.finish() == "日" * 500 + "\n"


def test_a_progress_bar_that_never_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LONGEST_LINE", 100)
    folder = Folder()
    for i in range(1000):
        assert folder.feed(b"%d %%\r" % i) == ""
    assert folder.partial() == "999 %"
    assert folder.feed(b"done\n") == "done\n"


def session_of(events: list[dict[str, Any]]) -> Session:
    return Session(INVENTORY, "lab", FakeTransport({"logs": [[*events, END]]}))


@pytest.mark.parametrize(
    "events",
    [
        [{"at": {"inode": 1, "offset": 0}}, {"at": {"inode": 1, "offset": 5}}],
        [{"data": zlib.compress(b"x"), "size": 1}],
        [{"at": {"inode": 1, "offset": 0}}, {"data": "x", "size": 1}],
        [{"at": {"inode": 1, "offset": 0}}, {"data": b"!!!", "size": 3}],
        [{"at": {"inode": 1, "offset": 0}}, {"data": zlib.compress(b"abc"), "size": 99}],
        [{"at": {"inode": 1, "offset": 0}}, {"data": zlib.compress(b"abc")[:-1], "size": 3}],
        [{"something": "else"}],
    ],
)
def test_a_remote_that_breaks_the_rules_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(BadAnswer):
        tail(session_of(events), TailOptions("r1"), io.StringIO())


def test_a_piece_that_unpacks_to_more_than_it_says_is_refused() -> None:
    bomb = zlib.compress(b"\0" * (64 << 20))
    with pytest.raises(BadAnswer):
        tail(
            session_of([{"at": {"inode": 1, "offset": 0}}, {"data": bomb, "size": 64 << 20}]),
            TailOptions("r1"),
            io.StringIO(),
        )


@pytest.mark.parametrize(("text", "seconds"), [("90s", -90.0), ("10m", -600.0), ("2h", -7200.0), ("1d", -86400.0)])
def test_since_takes_a_time_span_by_the_containers_clock(text: str, seconds: float) -> None:
    assert parse_since(text) == seconds


def test_since_takes_a_moment() -> None:
    assert parse_since("2026-11-30T07:20:00Z") == parse_since("2026-11-30T08:20:00+01:00") == 1796023200.0


@pytest.mark.parametrize("text", ["", "yesterday", "10", "-5m", "10 m", "٣m"])
def test_since_refuses_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError):
        parse_since(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(data: bytes, monkeypatch: pytest.MonkeyPatch, term: str) -> str:
    """What is written to a terminal of 20 columns for an unfinished line."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", term)
    out = Terminal()
    screen = logs._Screen(out)
    folder = Folder()
    folder.feed(data)
    screen.draw(folder.partial())
    screen.clear()
    return out.getvalue()


@pytest.mark.parametrize("text", ["x" * 50, "日本語" * 20, "a日" * 20, "\ta\tb\tc\td", "e\u0301" * 19, "short"])
def test_an_unfinished_line_takes_one_row_of_the_terminal(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    row = drawn(text.encode(), monkeypatch, "xterm").removesuffix("\r\x1b[K")
    assert cell_len(row) <= 19
    assert "\t" not in row
    assert text.expandtabs().startswith(row)
    assert cell_len(row) >= min(18, cell_len(text))


def test_on_a_dumb_terminal_nothing_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(b"50 %", monkeypatch, "dumb") == ""
