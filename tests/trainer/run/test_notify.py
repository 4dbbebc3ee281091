"""What reaches the service manager's socket."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.run.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield receiver


def messages(receiver: socket.socket) -> list[str]:
    receiver.setblocking(False)
    received = []
    while True:
        try:
            received.append(receiver.recv(4096).decode())
        except BlockingIOError:
            return received


def test_a_status_arrives_on_one_line(manager: socket.socket) -> None:
    Notifier().status("step 3/200\nloss 1.5")
    assert messages(manager) == ["STATUS=step 3/200 loss 1.5"]


def test_readiness_and_stopping_arrive(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready()
    notifier.stopping()
    assert messages(manager) == ["READY=1", "STOPPING=1"]


def test_an_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"dflash-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        Notifier().status("hello")
        assert messages(receiver) == ["STATUS=hello"]


def test_pings_leave_only_when_a_watchdog_waits_for_them(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    Notifier().ping()
    assert messages(manager) == []
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    Notifier().ping()
    assert messages(manager) == ["WATCHDOG=1"]


def test_a_fast_loop_does_not_flood_the_manager(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3600000000")
    notifier = Notifier()
    for _ in range(100):
        notifier.ping()
    assert messages(manager) == ["WATCHDOG=1"]


def test_a_silence_can_be_announced_and_ended(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    notifier = Notifier()
    notifier.expect_silence(600)
    notifier.expect_progress()
    assert messages(manager) == ["WATCHDOG_USEC=600000000", "WATCHDOG=1", "WATCHDOG_USEC=30000000", "WATCHDOG=1"]
    notifier.expect_silence(1)  # never shorter than what the unit asks for
    assert messages(manager)[0] == "WATCHDOG_USEC=30000000"


def test_measured_steps_shorten_the_watchdogs_period_and_never_lengthen_it(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3600000000")
    notifier = Notifier()
    notifier.expect_progress(300)
    notifier.expect_progress(7200)
    assert messages(manager) == ["WATCHDOG_USEC=300000000", "WATCHDOG=1", "WATCHDOG_USEC=3600000000", "WATCHDOG=1"]


def test_another_process_watchdog_is_left_to_it(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    Notifier().ping()
    assert messages(manager) == []


def test_a_manager_that_is_missing_for_a_while_hears_of_what_comes_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    notifier = Notifier()
    notifier.status("nobody hears this")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        notifier.status("hello")
        assert messages(receiver) == ["STATUS=hello"]
