"""A real sshd on loopback: host keys, user keys, hosts that do not answer, jump hosts, and connections that are cut."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from dflash_ops.transport.base import (
    ConnectionLost,
    Deadline,
    Misconfigured,
    NotPermitted,
    Program,
    Unanswered,
    Unreachable,
)
from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.hosts import ssh_host
from dflash_ops.transport.known_hosts import UnknownKey
from dflash_ops.transport.program import BOOTSTRAP
from dflash_ops.verbs.trust import trust
from tests.ops.sshd import NEEDS_SSHD, Server, ask, free_port, make_inventory, open_host, refusal

pytestmark = NEEDS_SSHD


def test_a_program_runs_and_one_connection_serves_several(server: Server, tmp_path: Path) -> None:
    host = open_host(tmp_path, main=server.entry())
    way = FramedTransport(host, BOOTSTRAP, lambda text, status: None)
    for _ in range(3):
        assert way.run(Program("env"), {"root": str(tmp_path), "do": "list"}).value == {
            "environments": [],
            "interpreters": {},
        }
    connected = host.connect()
    assert way.run(Program("env"), {"root": str(tmp_path), "do": "list"}).value == {
        "environments": [],
        "interpreters": {},
    }
    assert host.connect() is connected
    way.close()


def test_an_unknown_host_key_is_refused_and_nothing_is_written(server: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **server.entry(known_hosts=str(tmp_path / "known")))
    assert isinstance(error, NotPermitted)
    assert error.code == 77
    assert "SHA256:" in error.message
    assert "dflash trust main" in error.hint
    assert not (tmp_path / "known").exists()


def test_the_fingerprint_is_the_one_that_ssh_keygen_shows(server: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **server.entry(known_hosts=str(tmp_path / "known")))
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(server.folder / "host.pub")], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[1] in error.message


def test_a_changed_host_key_is_refused_with_the_exact_cure(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    kind, key = (server.folder / "stranger.pub").read_text().split()[:2]
    known.write_text(f"[127.0.0.1]:{server.port} {kind} {key}\n")
    error = refusal(tmp_path, **server.entry(known_hosts=str(known)))
    assert error.code == 77
    assert "CHANGED" in error.message
    assert f"ssh-keygen -f {known} -R '[127.0.0.1]:{server.port}'" in error.hint


def test_a_revoked_host_key_is_refused_though_it_is_known(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    kind, key = (server.folder / "host.pub").read_text().split()[:2]
    known.write_text(f"{server.known_line}@revoked * {kind} {key}\n")
    assert "revoked" in refusal(tmp_path, **server.entry(known_hosts=str(known))).message


def test_hashed_names_are_found_and_damaged_lines_passed_over(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(server.known_line)
    subprocess.run(["ssh-keygen", "-H", "-f", str(known)], check=True, capture_output=True)
    known.write_text(f"junk\nhost ssh-ed25519 !!!\n@cert-authority * ssh-rsa AAAA\n{known.read_text()}")
    assert "127.0.0.1" not in known.read_text()
    assert ask(open_host(tmp_path, main=server.entry(known_hosts=str(known))), tmp_path) == {
        "environments": [],
        "interpreters": {},
    }


def test_trust_writes_what_was_accepted_and_ssh_reads_it(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "new/known"
    known.parent.mkdir()
    known.write_text("# a comment without an end")
    inventory = make_inventory(tmp_path, main=server.entry(known_hosts=str(known)))
    with pytest.raises(NotPermitted):
        trust(inventory, "main", lambda key: False)
    assert "ssh-ed25519" not in known.read_text()
    report = trust(inventory, "main", lambda key: True)
    assert [key.kind for key in report.accepted] == ["ssh-ed25519"]
    assert report.logged_in
    assert known.read_text() == f"# a comment without an end\n{server.known_line}"
    assert trust(inventory, "main", lambda key: False).accepted == []
    assert ask(ssh_host("main", inventory), tmp_path) == {"environments": [], "interpreters": {}}


def test_trust_asks_about_each_hop(server: Server, tmp_path: Path) -> None:
    known = str(tmp_path / "known")
    hop = server.entry(address="localhost", known_hosts=known)
    inventory = make_inventory(tmp_path, main=server.entry(known_hosts=known, jump=["hop"]), hop=hop)
    asked: list[str] = []

    def accept(key: UnknownKey) -> bool:
        asked.append(key.host)
        return True

    report = trust(inventory, "main", accept)
    assert asked == [f"[localhost]:{server.port}", f"[127.0.0.1]:{server.port}"]
    assert [key.host for key in report.accepted] == asked
    assert report.logged_in


def test_trust_never_takes_a_changed_key(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    kind, key = (server.folder / "stranger.pub").read_text().split()[:2]
    known.write_text(f"[127.0.0.1]:{server.port} {kind} {key}\n")
    with pytest.raises(NotPermitted, match="CHANGED"):
        trust(make_inventory(tmp_path, main=server.entry(known_hosts=str(known))), "main", lambda key: True)


def test_a_wrong_key_is_refused_with_the_cure(server: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **server.entry(identity=str(server.folder / "stranger")))
    assert error.code == 77
    assert "refused every key" in error.message
    assert f"ssh-copy-id -i {server.folder / 'stranger'}" in error.hint


def test_an_encrypted_key_without_an_agent_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "locked"
    shutil.copy(server.folder / "user", key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)], check=True)
    error = refusal(tmp_path, **server.entry(identity=str(key)))
    assert error.code == 77
    assert "encrypted" in error.message
    assert "ssh-add" in error.hint


def test_a_key_file_that_is_missing_or_no_key_is_named(server: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **server.entry(identity=str(tmp_path / "nosuch")))
    assert isinstance(error, Misconfigured)
    assert "nosuch" in error.message
    error = refusal(tmp_path, **server.entry(identity=str(tmp_path / "nosuch"), cure="run `make up`"))
    assert error.hint == "run `make up`"
    (tmp_path / "text").write_text("not a key\n")
    assert refusal(tmp_path, **server.entry(identity=str(tmp_path / "text"))).code == 77


def test_a_port_without_sshd_is_refused(server: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **server.entry(port=free_port()))
    assert isinstance(error, Unreachable)
    assert error.code == 69
    assert "refused the connection" in error.message


def test_a_name_that_does_not_resolve_is_named(server: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **server.entry(address="nosuch.invalid"))
    assert error.code == 69
    assert "does not resolve" in error.message


def test_a_host_that_accepts_and_says_nothing_is_left_in_time(server: Server, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error = refusal(tmp_path, **server.entry(port=silent.getsockname()[1], connect_timeout=0.5))
    assert error.code == 69
    assert "did not answer in time" in error.message


def test_a_command_that_says_nothing_is_left_at_the_deadline(server: Server, tmp_path: Path) -> None:
    host = open_host(tmp_path, main=server.entry())
    way = FramedTransport(host, "sleep 60", lambda text, status: None)
    with pytest.raises(Unanswered, match=r"no answer from main within 0\.5 s"):
        way.run(Program("store"), {"root": "/x"}, deadline=0.5)
    way.close()


def test_an_answer_is_taken_though_a_child_keeps_the_channel_open(server: Server, tmp_path: Path) -> None:
    host = open_host(tmp_path, main=server.entry())
    way = FramedTransport(host, f"{BOOTSTRAP}; sleep 60 &", lambda text, status: None)
    assert way.run(Program("env"), {"root": str(tmp_path), "do": "list"}).value == {
        "environments": [],
        "interpreters": {},
    }
    way.close()


def test_megabytes_flow_in_both_directions_at_once(server: Server, tmp_path: Path) -> None:
    host = open_host(tmp_path, main=server.entry())
    piece = bytes(range(256)) * 1024
    script = "tee /dev/stderr"
    exchange = host.exchange(script, iter([piece] * 40), Deadline(120), keep_stdin=False)
    received = b"".join(exchange)
    assert received == piece * 40
    assert exchange.status == 0
    assert exchange.stderr == (piece * 40)[-64 * 1024 :]
    host.close()


def test_a_cut_connection_is_lost_and_the_next_call_connects_anew(server: Server, tmp_path: Path) -> None:
    host = open_host(tmp_path, main=server.entry())
    exchange = host.exchange("echo $PPID; cat", iter([]), Deadline(60), keep_stdin=True)
    chunks = iter(exchange)
    pid = int(next(chunks))
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(ConnectionLost, match="the connection to main broke"):
        list(chunks)
    assert ask(host, tmp_path) == {"environments": [], "interpreters": {}}


def test_a_tunnel_that_leads_nowhere_is_not_called_slow(server: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_at_once() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=close_at_once)
        thread.start()
        error = refusal(tmp_path, **server.entry(port=listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert error.code == 69
    assert "closed the connection before its ssh greeting" in error.message


def test_jump_hosts_are_as_strict_as_the_last_one(server: Server, tmp_path: Path) -> None:
    hop = server.entry()
    assert ask(open_host(tmp_path, main=server.entry(jump=["hop"]), hop=hop), tmp_path) == {
        "environments": [],
        "interpreters": {},
    }
    strange = server.entry(known_hosts=str(tmp_path / "empty"))
    with pytest.raises(NotPermitted, match="is not known") as caught:
        ask(open_host(tmp_path, main=server.entry(jump=["hop"]), hop=strange), tmp_path)
    assert "dflash trust hop" in caught.value.hint


def test_what_a_jump_host_cannot_reach_is_said(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="the jump host cannot reach"):
        ask(open_host(tmp_path, main=server.entry(jump=["hop"], port=free_port()), hop=server.entry()), tmp_path)


def test_the_ssh_configuration_is_read(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host nick\n HostName 127.0.0.1\n Port {server.port}\n User {getpass.getuser()}\n"
        f" IdentityFile {tmp_path}/missing\n IdentityFile {server.folder}/user\n"
        f" UserKnownHostsFile {server.folder}/known_hosts\n ProxyJump none\n"
    )
    assert ask(open_host(tmp_path, main={"address": "nick", "ssh_config": str(config)}), tmp_path)


def test_a_jump_of_the_ssh_configuration_is_taken(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host nick\n ProxyJump {getpass.getuser()}@hop:{server.port}\n"
        f"Host *\n HostName 127.0.0.1\n IdentityFile {server.folder}/user\n"
    )
    entry = server.entry(address="nick", ssh_config=str(config), identity=None)
    host = open_host(tmp_path, main=entry)
    exchange = host.exchange("echo $SSH_CONNECTION", iter([]), Deadline(30), keep_stdin=False)
    assert b"".join(exchange)
    host.close()


def test_a_broken_ssh_configuration_is_one_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host *\n  NoSuchKeyword yes\n")
    error = refusal(tmp_path, **server.entry(ssh_config=str(tmp_path / "config")))
    assert error.code == 78
    assert "ssh configuration" in error.message
    assert "nosuchkeyword" in error.message
