"""Servers that take few logins or sessions, and nodes that say something in place of running a command."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_ops.inventory.models import HostEntry
from dflash_ops.transport.base import (
    ConnectionLost,
    Deadline,
    NotPermitted,
    Program,
    TransportError,
    Unanswered,
    Unreachable,
)
from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.program import BOOTSTRAP
from tests.ops.sshd import NEEDS_SSHD, Server, ask, open_host, refusal, running_sshd

pytestmark = NEEDS_SSHD
ENTER = f"/usr/sbin/pct exec 200 --keep-env 0 -- {BOOTSTRAP}"


@contextlib.contextmanager
def limited(folder: Path, via: str, **settings: object) -> Iterator[Server]:
    with running_sshd(folder, **settings) as found:
        yield dataclasses.replace(found, via=via)


def unauthenticated(server: Server) -> socket.socket:
    """A connection that takes one of the server's MaxStartups."""
    while True:
        holder = socket.create_connection(("127.0.0.1", server.port))
        if holder.recv(64).startswith(b"SSH-"):
            return holder
        holder.close()
        time.sleep(0.05)


def test_where_one_session_is_allowed_a_second_one_gets_its_own_connection(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxSessions=1) as server:
        host = open_host(tmp_path, main=server.entry())
        held = host.exchange("echo here; cat", iter([]), Deadline(60), keep_stdin=True)
        chunks = iter(held)
        assert next(chunks) == b"here\n"
        for _ in range(3):
            assert b"".join(host.exchange("echo two", iter([]), Deadline(60), keep_stdin=False)) == b"two\n"
        held.close()
        host.close()


def test_sessions_in_a_row_need_one_session_only(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxSessions=1) as server:
        host = open_host(tmp_path, main=server.entry())
        way = FramedTransport(host, f"{BOOTSTRAP}; sleep 0.3", lambda text, status: None)
        for _ in range(4):  # each is closed at its result, while its shell still runs
            way.run(Program("env"), {"root": str(tmp_path), "do": "list"})
        way.close()


def test_a_server_without_sessions_names_the_limit(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxSessions=0) as server:
        error = refusal(tmp_path, **server.entry(connect_timeout=1))
    assert isinstance(error, Unanswered)
    assert "MaxSessions" in error.message


def test_a_server_with_too_many_logins_is_tried_again(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxStartups="1:100:1") as server:
        holder = unauthenticated(server)
        threading.Timer(0.8, holder.close).start()
        assert ask(open_host(tmp_path, main=server.entry(connect_timeout=20)), tmp_path)


def test_six_logins_at_once_get_in_where_two_are_allowed(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxStartups="2:100:2") as server, ThreadPoolExecutor(6) as pool:
        hosts = [open_host(tmp_path, main=server.entry(connect_timeout=40)) for _ in range(6)]
        assert all(pool.map(lambda host: ask(host, tmp_path), hosts))


def test_a_server_that_stays_full_names_the_limit(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxStartups="1:100:1") as server, unauthenticated(server):
        error = refusal(tmp_path, **server.entry(connect_timeout=1))
    assert isinstance(error, Unreachable)
    assert "MaxStartups" in error.message


def test_a_full_jump_host_is_tried_again_too(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, MaxStartups="2:100:2") as server:
        for holder in [unauthenticated(server), unauthenticated(server)]:
            threading.Timer(0.8, holder.close).start()
        hop = server.entry(connect_timeout=20)
        assert ask(open_host(tmp_path, main={**hop, "jump": ["hop"]}, hop=hop), tmp_path)


@pytest.mark.parametrize(
    ("forced", "kind", "said"),
    [
        ("/usr/sbin/nologin", NotPermitted, "This account is currently not available."),
        ('rbash -c "$SSH_ORIGINAL_COMMAND"', NotPermitted, "restricted: cannot specify"),
        (
            "echo 'sudo: sorry, you must have a tty to run sudo' >&2; exit 1",
            NotPermitted,
            "sorry, you must have a tty to run sudo",
        ),
        ("echo only backups here", ConnectionLost, "only backups here"),
        ("echo go away >&2; exit 255", ConnectionLost, "go away"),
    ],
)
def test_what_a_node_says_in_place_of_the_command_stands_in_the_message(
    via: str, tmp_path: Path, forced: str, kind: type[TransportError], said: str
) -> None:
    with limited(tmp_path, via, ForceCommand=forced) as server:
        way = FramedTransport(open_host(tmp_path, main=server.entry()), ENTER, lambda text, status: None)
        with pytest.raises(kind) as caught:
            way.run(Program("env"), {"root": str(tmp_path), "do": "list"}, deadline=30)
        way.close()
    assert said in caught.value.message
    assert "the container was not reached" in caught.value.message
    assert "main" in caught.value.message
    assert caught.value.hint


def test_a_program_that_began_and_died_is_not_taken_for_the_nodes_words(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via) as server:
        command = "echo @@DFLASH started; echo Killed; exit 137"
        way = FramedTransport(open_host(tmp_path, main=server.entry()), command, lambda *_: None)
        with pytest.raises(ConnectionLost, match=r"ended in the container without an answer \(exit code 137\)"):
            way.run(Program("env"), {"root": str(tmp_path), "do": "list"}, deadline=30)
        way.close()


def test_a_user_who_may_run_no_commands_is_told_so(via: str, tmp_path: Path) -> None:
    with limited(tmp_path, via, ForceCommand="internal-sftp") as server:
        error = refusal(tmp_path, **server.entry())
    assert "main" in error.message


def test_via_is_paramiko_or_openssh() -> None:
    assert HostEntry.model_validate({"address": "x"}).via == "paramiko"
    with pytest.raises(ValueError, match="openssh"):
        HostEntry.model_validate({"address": "x", "via": "telnet"})


def test_the_ssh_client_ends_with_us(sshd: Server, tmp_path: Path) -> None:
    host = open_host(tmp_path, main={**sshd.entry(), "via": "openssh"})
    host.connect()
    master, folder = host._master, host._folder  # type: ignore[attr-defined]
    assert master.poll() is None
    assert folder.exists()
    master.stdin.close()  # as when this process is killed
    master.wait(10)
    assert not folder.exists()
    host.close()
