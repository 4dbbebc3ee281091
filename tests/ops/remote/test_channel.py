"""A program answers in frames: its time is limited, and its failure is one sentence."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from dflash_ops.remote.channel import Channel, PeerGone
from dflash_ops.transport.base import (
    Program,
    RemoteRefusal,
)
from tests.ops.local import make_run, transport


def test_a_program_past_its_time_ends_itself(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    make_run(tmp_path)
    (tmp_path / "runs/r1/spec.json").unlink()
    os.mkfifo(tmp_path / "runs/r1/spec.json")  # opening it blocks for ever
    way = transport()
    request = {"root": str(tmp_path), "run": "r1", "argv": ["true"]}
    with pytest.raises(RemoteRefusal, match="did not finish `exec` within 1 s") as caught:
        way.run(Program("exec"), request, deadline=1.9)
    assert caught.value.code == 75


def test_a_refusal_carries_code_sentence_cure_and_reason(tmp_path: Path) -> None:
    with pytest.raises(RemoteRefusal) as caught:
        transport().run(Program("exec"), {"root": str(tmp_path), "run": "nosuch", "argv": ["true"]})
    assert (caught.value.code, caught.value.reason) == (102, "no-run")
    assert "nosuch" in caught.value.message
    assert caught.value.hint


def test_a_crash_in_a_program_shows_its_place_only_as_detail(tmp_path: Path) -> None:
    with pytest.raises(RemoteRefusal) as caught:
        transport().run(Program("env"), {"root": str(tmp_path)})
    assert caught.value.code == 70
    assert "KeyError" in caught.value.message
    assert "dflash_ops/remote/env.py" in caught.value.detail


def test_a_full_or_missing_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "releases").write_text("not a folder")
    request = {"root": str(tmp_path), "shelf": "releases", "name": "e" * 32, "files": []}
    with pytest.raises(RemoteRefusal) as caught:
        transport().run(Program("store"), request)
    assert caught.value.code == 78


def test_a_payload_is_read_to_its_end_whatever_stood_in_the_buffer(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"header\n0123456789")
    with os.fdopen(reader, "rb") as source:
        source.readline()  # as the bootstrap does: the rest is in the buffer, where select can't see it
        channel = Channel(source, io.BytesIO())
        assert channel.receive(0) == b""
        assert [channel.receive(4), channel.receive(4), channel.receive(4)] == [b"0123", b"4567", b"89"]
        os.write(writer, b"more")
        assert channel.receive(100) == b"more"
        os.close(writer)
        assert channel.receive(100) == b""


def test_a_payload_that_stops_coming_is_given_up_after_showing_life(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x")
    sink = io.BytesIO()
    with os.fdopen(reader, "rb") as source:
        channel = Channel(source, sink)
        assert channel.receive(1) == b"x"
        channel._last -= 10
        with pytest.raises(PeerGone):
            channel.receive(1, idle=0)
    os.close(writer)
    assert b"beat" in sink.getvalue()
