"""A line means the same in an excerpt and in a followed log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.remote.files import tail_lines
from dflash_ops.text import visible
from dflash_ops.verbs.logs import Folder

CONTENT = st.lists(
    st.sampled_from(
        [b"a", b"loss 3.21", b"\n", b"\r", b"\r\n", b"\x0b", b"\x0c", b"\x1c", "\u2028\x85日".encode(), b"\xff"]
    ),
    max_size=40,
).map(b"".join)


@given(data=CONTENT, count=st.integers(1, 50))
def test_an_excerpt_has_the_lines_that_tail_logs_shows(
    data: bytes, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(data)
    folder = Folder()
    followed = (folder.feed(data) + folder.finish()).split("\n")[:-1]
    assert [visible(line) for line in tail_lines(str(path), count)] == followed[-count:]


@pytest.mark.parametrize("states", [251, 8000])
def test_the_states_of_a_progress_bar_do_not_push_out_the_lines_before_it(tmp_path: Path, states: int) -> None:
    bar = "".join(f"\rloading shards: {i:6d}/{states} {'█' * 20}" for i in range(states))
    (tmp_path / "log").write_text(f"torch.OutOfMemoryError: CUDA out of memory\n{bar}\nlast")
    lines = tail_lines(str(tmp_path / "log"), 50)
    assert lines[0] == "torch.OutOfMemoryError: CUDA out of memory"
    assert lines[1].startswith(f"loading shards: {states - 1:6d}")
    assert lines[2:] == ["last"]


def test_an_excerpt_stays_small(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 1_000_000 + "\n" + "y" * 100 + "\n")
    lines = tail_lines(str(tmp_path / "log"), 50, 1000)
    assert lines == ["x" * 899, "y" * 100]


def test_a_log_that_is_empty_or_not_there_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    assert tail_lines(str(tmp_path / "log"), 5) == tail_lines(str(tmp_path / "none"), 5) == []
