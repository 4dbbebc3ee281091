"""Frames are found in any noise; what breaks the rules is refused, and never fills the memory."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.remote.channel import Channel
from dflash_ops.transport import framing
from dflash_ops.transport.base import BadAnswer, Misconfigured
from dflash_ops.transport.framing import FrameDecoder


def line(kind: str, value: object) -> bytes:
    return b"\n@@DFLASH " + json.dumps({"kind": kind, "value": value}).encode() + b"\n"


def sent(data: bytes | None = None, **value: object) -> bytes:
    """An event as the remote side writes it."""
    sink = io.BytesIO()
    Channel(io.BytesIO(), sink).event(data, **value)
    return sink.getvalue()


@given(
    values=st.lists(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3), min_size=1, max_size=4),
    noise=st.lists(st.binary(max_size=40).filter(lambda data: b"@@" not in data), min_size=5, max_size=5),
    cut=st.integers(1, 17),
)
def test_frames_come_out_the_same_whatever_stands_between_and_however_they_are_cut(
    values: list[dict[str, str]], noise: list[bytes], cut: int
) -> None:
    stream = noise[0]
    for index, value in enumerate(values):
        stream += line("event", value) + noise[index + 1]
    decoder = FrameDecoder()
    found = [frame for start in range(0, len(stream), cut) for frame in list(decoder.feed(stream[start : start + cut]))]
    assert found == [("event", value) for value in values]


@given(
    bodies=st.lists(st.one_of(st.none(), st.binary(max_size=60), st.just(b"\n@@DFLASH {}\n")), max_size=4),
    noise=st.binary(max_size=20).filter(lambda data: b"@@" not in data),
    cut=st.integers(1, 17),
)
def test_bytes_come_as_they_are_whatever_is_in_them_and_however_they_are_cut(
    bodies: list[bytes | None], noise: bytes, cut: int
) -> None:
    stream = b"".join(sent(body, number=i) + noise for i, body in enumerate(bodies))
    decoder = FrameDecoder()
    found = [frame for start in range(0, len(stream), cut) for frame in decoder.feed(stream[start : start + cut])]
    values = [{"number": i} if body is None else {"number": i, "data": body} for i, body in enumerate(bodies)]
    assert found == [("event", value) for value in values]


def test_bytes_that_do_not_all_come_are_no_frame() -> None:
    whole = sent(b"0123456789", size=10)
    for length in range(len(whole)):
        assert list(FrameDecoder().feed(whole[:length])) == []


@pytest.mark.parametrize("data", [b"01234567890", b"0123456789 and more"])
def test_bytes_that_something_came_between_are_refused(data: bytes) -> None:
    with pytest.raises(BadAnswer, match="malformed"):
        list(FrameDecoder().feed(sent(b"0123456789", size=10).replace(b"0123456789", data)))


@pytest.mark.parametrize("size", ["-1", "1.0", "true", '"9"', "[]", str(9 << 20), "9" * 4000])
def test_a_frame_with_a_senseless_number_of_bytes_is_refused(size: str) -> None:
    with pytest.raises(BadAnswer):
        list(FrameDecoder().feed(b'\n@@DFLASH {"kind": "event", "value": {}, "bytes": %s}\n' % size.encode()))


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"kind": "event"}',
        b'{"kind": "event", "value": []}',
        b'{"kind": "run-this", "value": {}}',
        b'{"kind": 1, "value": {}}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"kind": "event", "value": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_malformed_frame_is_refused(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        list(FrameDecoder().feed(b"\n@@DFLASH " + body + b"\n"))


def test_a_giant_frame_is_refused_before_it_ends() -> None:
    decoder = FrameDecoder()
    piece = b"x" * (1 << 20)
    assert list(decoder.feed(b"\n@@DFLASH ")) == []
    with pytest.raises(BadAnswer, match="more than 8 MiB"):
        [list(decoder.feed(piece)) for _ in range(9)]


def test_endless_noise_is_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_NOISE", 10_000)
    decoder = FrameDecoder()
    with pytest.raises(BadAnswer, match="no answer"):
        [list(decoder.feed(b"y" * 1000)) for _ in range(11)]
    assert len(decoder.noise_tail) <= 4096


def test_noise_is_forgiven_after_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_NOISE", 10_000)
    decoder = FrameDecoder()
    for _ in range(5):
        list(decoder.feed(b"y" * 9000))
        assert list(decoder.feed(line("event", {}))) == [("event", {})]


def test_a_frame_needs_a_line_of_its_own() -> None:
    assert list(FrameDecoder().feed(b'Welcome @@DFLASH {"kind": "result", "value": {}}\n')) == []


def test_a_container_without_python_is_named() -> None:
    with pytest.raises(Misconfigured, match="no python3") as caught:
        list(FrameDecoder().feed(b"@@DFLASH no-python3\n"))
    assert caught.value.code == 78


def test_an_answer_that_never_ends_is_refused_before_it_fills_our_memory() -> None:
    event = framing.MARK + b'{"kind": "event", "value": {}}\n'
    bounded, stream = FrameDecoder(10 * len(event)), FrameDecoder()
    for _ in range(10):
        assert len(list(bounded.feed(event))) == len(list(stream.feed(event))) == 1
    with pytest.raises(BadAnswer, match="an answer of more than"):
        list(bounded.feed(event))
    assert len(list(stream.feed(event))) == 1
