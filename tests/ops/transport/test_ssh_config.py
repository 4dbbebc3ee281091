"""What the ssh configuration says holds as for OpenSSH's own client: where it logs in, both transports do."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_ops.errors import DflashError
from dflash_ops.transport import known_hosts
from dflash_ops.transport.base import Misconfigured, NotPermitted
from dflash_ops.transport.ssh_config import way
from tests.ops.sshd import (
    NEEDS_SSHD,
    Server,
    ask,
    make_inventory,
    make_key,
    open_host,
    refusal,
    running_sshd,
    ssh_client,
)

pytestmark = NEEDS_SSHD

RELAY = """
import socket, sys, threading, os
open(sys.argv[1], "a").write(" ".join(sys.argv[2:]) + chr(10))
with socket.create_connection((sys.argv[2], int(sys.argv[3]))) as far:
    def up():
        while data := os.read(0, 65536):
            far.sendall(data)
        far.shutdown(socket.SHUT_WR)
    threading.Thread(target=up, daemon=True).start()
    while data := far.recv(65536):
        os.write(1, data)
"""


@dataclass
class Agent:
    """A real ssh-agent."""

    socket: Path

    def add(self, *keys: Path) -> None:
        subprocess.run(["ssh-add", "-q", *map(str, keys)], env={"SSH_AUTH_SOCK": str(self.socket)}, check=True)


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    socket = tmp_path_factory.mktemp("a") / "s"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while not socket.exists() and time.monotonic() < end:
        time.sleep(0.02)
    yield Agent(socket)
    process.terminate()
    process.wait(10)


@pytest.fixture
def strangers(tmp_path: Path) -> list[Path]:
    """Six keys that no server knows: as many as an sshd takes by default."""
    keys = [tmp_path / f"stranger{number}" for number in range(6)]
    for key in keys:
        make_key(key)
    return keys


def base(server: Server) -> str:
    """The keywords that every configuration here ends with."""
    return (
        f"Host *\n HostName 127.0.0.1\n Port {server.port}\n User {getpass.getuser()}\n"
        f" UserKnownHostsFile {server.folder}/known_hosts\n GlobalKnownHostsFile none\n"
        f" IdentityFile {server.folder}/user\n"
    )


def logs_in(server: Server, folder: Path, config: str, name: str = "nick", **entry: object) -> bool:
    """Whether the transport logs in, which it must exactly if `ssh` does."""
    path = folder / "config"
    path.write_text(config)
    own = ssh_client(name, path)
    host = open_host(folder, main={"address": name, "ssh_config": str(path), "via": server.via, **entry})
    said = ""
    try:
        ask(host, folder)
    except DflashError as error:
        said = error.message
    assert (not said) == (own.stdout == "in\n"), f"we: {said}; ssh: {own.stderr}"
    return not said


def test_include_is_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "more").write_text(base(server))
    assert logs_in(server, tmp_path, f"Include {tmp_path}/more\n")


@pytest.mark.parametrize("criterion", ["tagged work", "localnetwork 192.0.2.0/24", "exec false", "!exec true"])
def test_a_criterion_of_match_that_does_not_hold_changes_nothing(
    server: Server, tmp_path: Path, criterion: str
) -> None:
    # ssh before 9.4 refuses the first two: then so do we, in its words.
    logs_in(server, tmp_path, f"Match {criterion}\n HostName nowhere.invalid\n{base(server)}")


def test_a_host_key_alias_is_the_name_in_known_hosts(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(server.known_line.replace(f"[127.0.0.1]:{server.port}", "the-node"))
    settings = f"UserKnownHostsFile {known}\n"
    assert logs_in(server, tmp_path, f"HostKeyAlias the-node\n{settings}{base(server)}")
    assert not logs_in(server, tmp_path, f"HostKeyAlias another\n{settings}{base(server)}")


def test_the_tokens_of_a_proxy_command_are_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    log = tmp_path / "log"
    command = f"ProxyCommand {sys.executable} {tmp_path}/relay.py {log} %h %p %n 100%% 'a b' $((6*7))\n"
    assert logs_in(server, tmp_path, command + base(server))
    theirs, ours = log.read_text().splitlines()
    assert ours == theirs == f"127.0.0.1 {server.port} nick 100% a b 42"


def test_what_a_proxy_command_says_when_it_fails_is_said(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"ProxyCommand sh -c 'echo no such instance >&2; exit 1'\n{base(server)}")
    error = refusal(tmp_path, **server.entry(ssh_config=str(tmp_path / "config")))
    assert error.code == 69
    assert "ProxyCommand" in error.message
    assert "no such instance" in error.message


def test_a_jump_hosts_own_jump_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    log = tmp_path / "log"
    config = (
        f"Host nick\n ProxyJump middle\nHost middle\n ProxyJump first\n"
        f"Host first\n ProxyCommand {sys.executable} {tmp_path}/relay.py {log} %h %p %n\n{base(server)}"
    )
    assert logs_in(server, tmp_path, config)
    assert log.read_text().splitlines() == [f"127.0.0.1 {server.port} first"] * 2
    hops = way("main", make_inventory(tmp_path, main={"address": "nick", "ssh_config": str(tmp_path / "config")}))
    assert [hop.asked for hop in hops] == ["first", "middle", "nick"]


def test_only_the_first_jump_hosts_own_jump_counts(server: Server, tmp_path: Path) -> None:
    config = f"Host nick\n ProxyJump one,two\nHost two\n ProxyJump nowhere.invalid\n{base(server)}"
    assert logs_in(server, tmp_path, config)


def test_jumps_that_lead_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(Misconfigured, match="circle"):
        way("main", make_inventory(tmp_path, main={"address": "a", "ssh_config": str(tmp_path / "config")}))


@pytest.mark.parametrize(
    ("jump", "expected"),
    [
        ("ssh://me@gate:2222", ("me", "gate", 2222)),
        ("ssh://gate/", (None, "gate", 22)),
        ("me@[2001:db8::1]:2222", ("me", "2001:db8::1", 2222)),
        ("[::1]", (None, "::1", 22)),
        ("ssh://me@[::1]:22", ("me", "::1", 22)),
        ("2001:db8::1", (None, "2001:db8::1", 22)),
        ("a@b@gate", ("a@b", "gate", 22)),
    ],
)
def test_a_jump_may_be_a_uri_or_ipv6(tmp_path: Path, jump: str, expected: tuple[str | None, str, int]) -> None:
    (tmp_path / "config").write_text("")
    entry = {"address": "nick", "ssh_config": str(tmp_path / "config"), "jump": [jump]}
    hop, _ = way("main", make_inventory(tmp_path, main=entry))
    assert (hop.user, hop.host, hop.port) == (expected[0] or getpass.getuser(), *expected[1:])


@pytest.mark.parametrize("jump", ["", "gate:port", "[gate]:22", "http://gate", "me@", "-oProxyCommand=x"])
def test_what_is_no_jump_is_an_error(tmp_path: Path, jump: str) -> None:
    entry = {"address": "nick", "ssh_config": "/dev/null", "jump": [jump]}
    with pytest.raises(Misconfigured) as caught:
        way("main", make_inventory(tmp_path, main=entry))
    assert repr(jump) in caught.value.message


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_a_jump_over_ipv6_is_reached(via: str, tmp_path: Path) -> None:
    with running_sshd(tmp_path, ListenAddress="127.0.0.1\nListenAddress ::1") as found:
        (tmp_path / "known_hosts").write_text(found.known_line + found.known_line.replace("127.0.0.1", "::1"))
        found.via = via
        config = f"Host nick\n ProxyJump {getpass.getuser()}@[::1]:{found.port}\n{base(found)}".replace(
            "Host *\n HostName 127.0.0.1", "Host nick\n HostName 127.0.0.1\nHost *"
        )
        assert logs_in(found, tmp_path, config)


def test_identities_only_with_a_public_key_takes_that_key_from_the_agent(
    server: Server, tmp_path: Path, agent: Agent, strangers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(*strangers, server.folder / "user")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    shutil.copy(server.folder / "user.pub", tmp_path / "mine.pub")
    lines = base(server).replace(f"{server.folder}/user\n", f"{tmp_path}/mine.pub\n")
    assert logs_in(server, tmp_path, f"IdentitiesOnly yes\n{lines}")
    assert logs_in(server, tmp_path, lines)  # named: it goes first, before the six


def test_a_key_that_identities_only_leaves_out_is_not_offered(
    server: Server, tmp_path: Path, agent: Agent, strangers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(server.folder / "user")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    lines = base(server).replace(f"{server.folder}/user\n", f"{strangers[0]}\n")
    assert logs_in(server, tmp_path, lines)
    assert not logs_in(server, tmp_path, f"IdentitiesOnly yes\n{lines}")


def test_too_many_keys_of_an_agent_name_the_servers_limit(
    server: Server, tmp_path: Path, agent: Agent, strangers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(*strangers, server.folder / "user")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    config = tmp_path / "config"
    config.write_text("IdentityFile none\n")
    error = refusal(tmp_path, **server.entry(identity=None, ssh_config=str(config)))
    assert isinstance(error, NotPermitted)
    assert error.code == 77
    assert "MaxAuthTries" in error.message
    assert "identity" in error.hint


def test_the_inventorys_identity_goes_before_an_agent_full_of_others(
    server: Server, tmp_path: Path, agent: Agent, strangers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(*strangers)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    assert ask(open_host(tmp_path, main=server.entry()), tmp_path)


def test_an_identity_agent_is_asked_in_place_of_the_usual_one(
    server: Server, tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(server.folder / "user")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    lines = base(server).replace(f"{server.folder}/user\n", "none\n")
    assert not logs_in(server, tmp_path, lines)
    assert logs_in(server, tmp_path, f"IdentityAgent {agent.socket}\n{lines}")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    assert not logs_in(server, tmp_path, f"IdentityAgent none\n{lines}")
    monkeypatch.setenv("OTHER_SOCKET", str(agent.socket))
    monkeypatch.delenv("SSH_AUTH_SOCK")
    assert logs_in(server, tmp_path, f"IdentityAgent $OTHER_SOCKET\n{lines}")


def test_an_encrypted_key_that_the_agent_holds_needs_no_passphrase(
    server: Server, tmp_path: Path, agent: Agent, strangers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(*strangers, server.folder / "user")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    key = tmp_path / "locked"  # without a .pub beside it
    shutil.copy(server.folder / "user", key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)], check=True)
    assert logs_in(server, tmp_path, base(server).replace(f"{server.folder}/user\n", f"{key}\n"))


def test_a_certificate_beside_the_key_is_shown(via: str, tmp_path: Path) -> None:
    make_key(tmp_path / "authority")
    with running_sshd(tmp_path, TrustedUserCAKeys=tmp_path / "authority.pub", AuthorizedKeysFile="none") as found:
        found.via = via
        assert not logs_in(found, tmp_path, base(found))
        sign = ["ssh-keygen", "-q", "-s", str(tmp_path / "authority"), "-I", "me", "-n", getpass.getuser()]
        subprocess.run([*sign, str(tmp_path / "user.pub")], check=True)
        assert logs_in(found, tmp_path, base(found))


def test_known_hosts_are_read_as_ssh_reads_them(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    name, kind, key = server.known_line.split()
    _, other = (server.folder / "stranger.pub").read_text().split()[:2]
    settings = f"UserKnownHostsFile {known}\n{base(server)}"
    for text, expected in (
        (f"[127.0.0.*]:{server.port} {kind} {key}\n", True),
        (f"[127.0.0.*]:{server.port},!{name} {kind} {key}\n", False),
        (f"127.0.0.1 {kind} {key}\n", True),  # without the port
        (f"{name} {kind} {other}\n{name} {kind} {key}\n", True),  # one of two keys
        (f"{name} {kind} {other}\n", False),
        (f"@revoked {name} {kind} {key}\n{server.known_line}", False),
        (f"@revoked elsewhere {kind} {key}\n{server.known_line}", True),
    ):
        known.write_text(text)
        assert logs_in(server, tmp_path, settings) == expected, text


def test_a_hashed_name_fits_its_host_only(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "known").write_text(f"[gate]:2222 {(tmp_path / 'key.pub').read_text()}")
    subprocess.run(["ssh-keygen", "-H", "-f", str(tmp_path / "known")], check=True, capture_output=True)
    (line,) = known_hosts.read([tmp_path / "known"])
    assert line.hosts.startswith("|1|")
    assert line.is_for("[gate]:2222")
    assert not line.is_for("gate")


# ---- without an ssh client ---------------------------------------------------------------------------------


@pytest.fixture
def no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def own_reader(server: Server, folder: Path, config: str) -> None:
    (folder / "config").write_text(config)
    with contextlib.closing(open_host(folder, main={"address": "nick", "ssh_config": str(folder / "config")})) as host:
        host.connect()


@pytest.mark.usefixtures("no_client")
def test_without_a_client_what_is_understood_still_holds(sshd: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(sshd.known_line.replace(f"[127.0.0.1]:{sshd.port}", "alias"))
    own_reader(
        sshd,
        tmp_path,
        f"Host *\n ServerAliveInterval 5\nHost nick\n HostKeyAlias alias\n UserKnownHostsFile {known}\n"
        f" ProxyJump none\n{base(sshd)}",
    )
    (tmp_path / "relay.py").write_text(RELAY)
    log = tmp_path / "log"
    command = f"ProxyCommand {sys.executable} {tmp_path}/relay.py {log} %h %p %n 100%%\n"
    own_reader(sshd, tmp_path, command + base(sshd))
    assert log.read_text() == f"127.0.0.1 {sshd.port} nick 100%\n"


@pytest.mark.usefixtures("no_client")
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("Include {folder}/more", "Include"),
        ("Match tagged work", "Match tagged"),
        ("Match host nick localnetwork 192.0.2.0/24", "Match localnetwork"),
        ("ProxyUseFdpass yes", "proxyusefdpass"),
        ("KnownHostsCommand /bin/true", "knownhostscommand"),
        ("Tag work", "tag"),
    ],
)
def test_without_a_client_what_is_not_understood_is_named(sshd: Server, tmp_path: Path, line: str, named: str) -> None:
    (tmp_path / "more").write_text("User nobody\n")
    with pytest.raises(Misconfigured) as caught:
        own_reader(sshd, tmp_path, f"{line.format(folder=tmp_path)}\n{base(sshd)}")
    assert named in caught.value.message
    assert caught.value.code == 78


@pytest.mark.usefixtures("no_client")
def test_without_a_client_via_openssh_says_so(sshd: Server, tmp_path: Path) -> None:
    error = refusal(tmp_path, **{**sshd.entry(), "via": "openssh"})
    assert error.code == 78
    assert "no `ssh` on this machine" in error.message


def test_what_only_openssh_follows_is_named(sshd: Server, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"ProxyUseFdpass yes\n{base(sshd)}")
    error = refusal(tmp_path, **{**sshd.entry(), "ssh_config": str(tmp_path / "config")})
    assert error.code == 78
    assert "proxyusefdpass" in error.message
    assert "via: openssh" in error.hint


# ---- what needs the ssh client -----------------------------------------------------------------------------


def test_a_control_master_of_the_users_own_is_used(
    sshd: Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = tmp_path / "config"
    control = tmp_path_factory.mktemp("c")  # a socket's path is short
    config.write_text(f"ControlPath {control}/%p\n{base(sshd)}")
    master = subprocess.Popen(
        ["ssh", "-F", str(config), "-M", "-N", "-o", "BatchMode=yes", "nick"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 20
    while not (control / str(sshd.port)).exists() and time.monotonic() < end:
        time.sleep(0.02)
    # As after a second factor that was given by hand: no key of ours opens another connection.
    config.write_text(config.read_text().replace(f"{sshd.folder}/user", "none") + " IdentityAgent none\n")
    entry = {"address": "nick", "ssh_config": str(config), "via": "openssh"}
    assert ask(open_host(tmp_path, main=entry), tmp_path)
    assert master.poll() is None, "it is not ours to end"
    master.terminate()
    master.wait(10)
    with pytest.raises(NotPermitted):
        ask(open_host(tmp_path, main=entry), tmp_path)


def test_a_second_factor_is_said(via: str, tmp_path: Path) -> None:
    with running_sshd(tmp_path, AuthenticationMethods="publickey,password", PasswordAuthentication="yes") as found:
        found.via = via
        error = refusal(tmp_path, **found.entry())
    assert error.code == 77
    assert "took the key" in error.message
    assert "password" in error.message
    assert "ControlMaster" in error.hint
