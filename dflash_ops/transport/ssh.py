"""How is a host reached? By a Fabric connection whose weak points are closed here and nowhere else.

Fabric trusts unknown host keys (here: refused, `dflash trust` asks), resolves ProxyJump with such connections
(here: every hop is built the same strict way), notices no dead peer (here: keepalive and TCP_USER_TIMEOUT), may wait
an hour for a channel and for ever for the answer to `exec` (here: a deadline on every call), and reads stdout before
stderr (here: one loop drains both).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import logging
import select
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from paramiko.hostkeys import HostKeyEntry
from paramiko.ssh_exception import BadHostKeyException
from pydantic import ValidationError

from dflash_ops.inventory.models import HostEntry, Inventory
from dflash_ops.transport.base import (
    ConnectionLost,
    Deadline,
    Misconfigured,
    NotPermitted,
    TransportError,
    Unanswered,
    Unreachable,
)

STDERR_KEPT = 64 * 1024
KEEPALIVE = 5  # seconds of silence after which a packet asks for an acknowledgement
DEAD_AFTER = 20  # seconds without acknowledgement after which the kernel gives the connection up

# paramiko logs what it also raises.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A host key that no known_hosts file holds."""

    host: str  # as known_hosts writes it: name, or [name]:port
    kind: str
    base64: str
    known_hosts: Path  # where it would be written

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` shows it."""
        digest = hashlib.sha256(base64.b64decode(self.base64)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class _NoKeyFile(Misconfigured):
    """A host that a command raises has none while it is down."""


Accept = Callable[[UnknownKey], bool]


class _Strict(paramiko.MissingHostKeyPolicy):
    """Refuses unknown host keys, unless `accept` takes them; then they are written down."""

    def __init__(self, name: str, known_hosts: Path, accept: Accept | None) -> None:
        self._name = name
        self._known_hosts = known_hosts
        self._accept = accept

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """See paramiko. Raises NotPermitted."""
        unknown = UnknownKey(hostname, key.get_name(), key.get_base64(), self._known_hosts)
        if self._accept is None or not self._accept(unknown):
            raise NotPermitted(
                f"the host key of {hostname} is not known ({unknown.kind} {unknown.fingerprint})",
                f"compare it with the host's own and run `dflash trust {self._name}`",
            )
        self._known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._known_hosts.open("a+b") as stream:
            stream.seek(0, 2)
            if stream.tell():
                stream.seek(-1, 2)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
            stream.write(f"{hostname} {unknown.kind} {unknown.base64}\n".encode())


class SshHost:
    """A host of the inventory. Its connection is opened at the first exchange and serves all that follow."""

    def __init__(self, name: str, inventory: Inventory, accept: Accept | None = None) -> None:
        self.name = name
        self.label = name
        self._entry = inventory.hosts[name]
        self._inventory = inventory
        self._accept = accept
        self._connections: list[Connection] = []  # the way to the host, itself last

    # ---- connecting ----------------------------------------------------------------------------------------

    def connect(self) -> paramiko.Transport:
        """The live connection, opened when there is none. Raises TransportError."""
        if self._connections and all(hop.is_connected for hop in self._connections):
            transport: paramiko.Transport = self._connections[-1].transport
            return transport
        self.close()
        gateway: Connection | None = None
        hops = [*self._hops(), (self.name, self._entry)]
        for name, entry in hops:
            try:
                connection = self._build(name, entry, gateway)
                self._connections.append(connection)
                self._open(name, entry, connection)
            except (Unreachable, _NoKeyFile) as error:
                error.hint = entry.cure or error.hint
                raise
            gateway = connection
        assert gateway is not None
        transport = gateway.transport
        return transport

    def _hops(self) -> list[tuple[str, HostEntry]]:
        """Jump hosts in order: the inventory's, else those of the ssh configuration."""
        jumps = list(self._entry.jump)
        if not jumps:
            found = str(self._ssh_config(self._entry).base_ssh_config.lookup(self._entry.address).get("proxyjump", ""))
            jumps = [] if found.lower() in ("", "none") else [part.strip() for part in found.split(",")]
        hops = []
        for jump in jumps:
            if jump in self._inventory.hosts:
                hops.append((jump, self._inventory.hosts[jump]))
                continue
            user, _, rest = jump.rpartition("@")
            address, _, port = rest.partition(":")
            if not address or (port and not port.isdigit()):
                raise Misconfigured(
                    f"{jump!r} is neither a host of the inventory nor user@address:port",
                    f"correct `jump` of host {self.name}",
                )
            inherited = {"known_hosts": self._entry.known_hosts, "ssh_config": self._entry.ssh_config}
            try:
                entry = HostEntry.model_validate(
                    {"address": address, "user": user or None, "port": int(port) if port else None, **inherited}
                )
            except ValidationError as error:
                raise Misconfigured(
                    f"the jump host {jump!r}: {error.errors()[0]['msg']}", f"correct `jump` of host {self.name}"
                ) from error
            hops.append((self.name, entry))
        return hops

    def _ssh_config(self, entry: HostEntry) -> Config:
        """The ssh configuration, and none of Fabric's own configuration files."""
        path = self._inventory.resolve(entry.ssh_config) if entry.ssh_config else None
        try:
            config = Config(lazy=True, runtime_ssh_path=str(path) if path else None)
            config.load_ssh_config()
            config.base_ssh_config.lookup(entry.address)
        except (paramiko.ConfigParseError, OSError, ValueError) as error:
            raise Misconfigured(
                f"the ssh configuration cannot be read: {error}",
                "correct it, or name another by `ssh_config:` of the host",
            ) from error
        return config

    def _build(self, name: str, entry: HostEntry, gateway: Connection | None) -> Connection:
        config = self._ssh_config(entry)
        found = config.base_ssh_config.lookup(entry.address)
        if "identityfile" in found:  # OpenSSH passes over those that do not exist; paramiko stops at them
            keys = [path for path in found["identityfile"] if Path(path).expanduser().is_file()]
        else:
            keys = []
        if entry.identity is not None:
            identity = self._inventory.resolve(entry.identity)
            if not identity.is_file():
                raise _NoKeyFile(
                    f"the key file {identity} of host {name} does not exist",
                    f"correct `identity` of host {name}, or create one with `ssh-keygen -t ed25519 -f {identity}`",
                )
            keys.insert(0, str(identity))
        connection = Connection(
            entry.address,
            user=entry.user,
            port=entry.port,
            config=config,
            gateway=gateway or found.get("proxycommand") or False,
            connect_timeout=None,
        )
        connection.connect_timeout = None  # _open gives a connected socket
        connection.connect_kwargs = {
            "key_filename": keys,
            "banner_timeout": entry.connect_timeout,
            "auth_timeout": entry.connect_timeout,
            "channel_timeout": entry.connect_timeout,
        }
        if gateway is not None or isinstance(connection.gateway, str):
            connection.connect_kwargs["timeout"] = entry.connect_timeout
        files = self._known_hosts(entry, found)
        for path in (*files, Path("/etc/ssh/ssh_known_hosts")):
            _load_known(connection.client, path)
        connection.client.set_missing_host_key_policy(_Strict(name, files[0], self._accept))
        return connection

    def _known_hosts(self, entry: HostEntry, found: Any) -> list[Path]:
        if entry.known_hosts is not None:
            return [self._inventory.resolve(entry.known_hosts)]
        named = shlex.split(str(found.get("userknownhostsfile", "~/.ssh/known_hosts")))
        return [Path(path).expanduser() for path in named]

    def _open(self, name: str, entry: HostEntry, connection: Connection) -> None:
        where = f"{name} ({connection.host}:{connection.port})"
        timer: threading.Timer | None = None
        try:
            if connection.gateway is False:
                connection.connect_kwargs["sock"] = _socket(connection.host, connection.port, entry.connect_timeout)
            # Whatever paramiko waits for without a limit of its own ends when its socket closes.
            timer = threading.Timer(3 * entry.connect_timeout, connection.client.close)
            timer.daemon = True
            timer.start()
            connection.open()
            self._refuse_revoked(where, entry, connection)
        except TransportError:
            raise
        except BadHostKeyException as error:
            raise self._changed_key(name, entry, connection, error) from error
        except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
            raise _explain(error, where, connection) from error
        finally:
            if timer is not None:
                timer.cancel()
        transport: paramiko.Transport = connection.transport
        transport.set_keepalive(KEEPALIVE)

    def _refuse_revoked(self, where: str, entry: HostEntry, connection: Connection) -> None:
        """Keys that a known_hosts file revokes; paramiko passes over these lines, whatever hosts they name."""
        key = connection.client.get_transport().get_remote_server_key().get_base64()
        for path in self._known_hosts(entry, connection.ssh_config):
            if path.is_file():
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    if line.startswith("@revoked ") and key in line.split():
                        connection.client.close()
                        raise NotPermitted(f"the host key of {where} is revoked", f"see the @revoked line in {path}")

    def _changed_key(
        self, name: str, entry: HostEntry, connection: Connection, error: BadHostKeyException
    ) -> NotPermitted:
        host = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
        files = self._known_hosts(entry, connection.ssh_config)
        shown = UnknownKey(host, error.key.get_name(), error.key.get_base64(), files[0])
        remove = f"ssh-keygen -f {shlex.quote(str(files[0]))} -R {shlex.quote(host)}"
        return NotPermitted(
            f"the host key of {host} has CHANGED (now {shown.kind} {shown.fingerprint}): "
            "somebody may be in between, or the host was set up anew",
            f"if you know why, run `{remove}` and then `dflash trust {name}`",
        )

    # ---- exchanging ----------------------------------------------------------------------------------------

    def exchange(self, command: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool) -> SshExchange:
        """See Host.exchange."""
        transport = self.connect()
        with _bounded(transport, self.label, deadline):
            channel = transport.open_session(timeout=max(0.1, deadline.remaining()))
            channel.exec_command(command)
        exchange = SshExchange(self.label, transport, channel, stdin, deadline, keep_stdin=keep_stdin)
        exchange.begin()
        return exchange

    def close(self) -> None:
        """Close the connection and those of its jump hosts."""
        while self._connections:
            with contextlib.suppress(Exception):
                self._connections.pop().client.close()


class SshExchange:
    """One channel: a single loop sends stdin and drains stdout and stderr."""

    def __init__(
        self,
        label: str,
        transport: paramiko.Transport,
        channel: paramiko.Channel,
        stdin: Iterator[bytes],
        deadline: Deadline,
        *,
        keep_stdin: bool,
    ) -> None:
        self.stderr = b""
        self.status: int | None = None
        self._label = label
        self._transport = transport
        self._channel = channel
        self._stdin = stdin
        self._deadline = deadline
        self._keep_stdin = keep_stdin
        self._pending = b""
        self._sending = True

    def begin(self) -> None:
        """Send the program at once, whenever the answer is read."""
        while self._channel.send_ready() and self._send() and self._pending:
            pass

    def __iter__(self) -> Iterator[bytes]:
        channel = self._channel
        exited: float | None = None
        while True:
            moved = self._sending and channel.send_ready() and self._send()
            if channel.recv_ready():
                moved = True
                yield self._read(channel.recv)
            if channel.recv_stderr_ready():
                moved = True
                self.stderr = (self.stderr + self._read(channel.recv_stderr))[-STDERR_KEPT:]
            if moved:
                continue
            if channel.exit_status_ready():
                # A background child may hold stdout open long after: two seconds for the rest of the output.
                exited = exited or time.monotonic()
                if channel.closed or channel.eof_received or time.monotonic() - exited > 2:
                    break
            if not self._transport.is_active():
                break
            if not self._deadline.remaining():
                raise Unanswered(
                    f"no answer from {self._label} within {self._deadline.seconds:g} s",
                    "the node or the container may be frozen (a backup?) or very busy: try again",
                    detail=self.stderr.decode("utf-8", "backslashreplace"),
                )
            self._wait()
        if channel.exit_status != -1:
            self.status = channel.exit_status
        elif not self._transport.is_active():
            cause = self._transport.get_exception()
            raise ConnectionLost(f"the connection to {self._label} broke", "try again", detail=repr(cause))

    def _read(self, receive: Callable[[int], bytes]) -> bytes:
        """What has come. paramiko widens the window as it reads, which fails when the connection has just broken."""
        try:
            return receive(1 << 16)
        except (EOFError, OSError, paramiko.SSHException) as error:
            raise ConnectionLost(f"the connection to {self._label} broke", "try again", detail=repr(error)) from error

    def _send(self) -> bool:
        """Send some of stdin; false when nothing could be sent."""
        self._pending = self._pending or next(self._stdin, b"")
        try:
            if self._pending:
                self._pending = self._pending[self._channel.send(self._pending) :]
                return True
            if not self._keep_stdin:
                self._channel.shutdown_write()
        except (OSError, EOFError):
            pass  # the command ended without reading it all: its answer says why
        self._sending = False
        return False

    def _wait(self) -> None:
        """Until something may have come, a second at most."""
        if self._channel.eof_received or self._channel.closed:
            time.sleep(0.01)  # the channel stays readable then: only the exit status is missing
            return
        # paramiko wakes nobody when the send window opens.
        longest = 0.02 if self._sending else 1.0
        select.select([self._channel], [], [], min(longest, self._deadline.remaining()))

    def close(self) -> None:
        """Close the channel: the command's stdin ends, its output goes nowhere."""
        with contextlib.suppress(Exception):
            self._channel.close()


def _load_known(client: paramiko.SSHClient, path: Path) -> None:
    """Read a known_hosts file. paramiko's own reader stops at lines that it does not know, such as @revoked."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.strip() and not line.startswith(("#", "@")):
            with contextlib.suppress(Exception):  # a damaged line makes its host unknown, no more
                entry = HostKeyEntry.from_line(line.strip())
                if entry is not None and entry.key is not None:
                    for name in entry.hostnames or []:
                        client.get_host_keys().add(name, entry.key.get_name(), entry.key)


class _Prompt(socket.socket):
    """A socket that acknowledges what it has read at once.

    sshd sends small packets in a row and, by Nagle's rule, holds each back until the one before is acknowledged, which
    Linux by itself delays by 40 ms: twice while connecting. The kernel forgets the option, so each read renews it.
    """

    def recv(self, size: int, flags: int = 0) -> bytes:
        """See socket.socket."""
        data = super().recv(size, flags)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


def _socket(host: str, port: int, timeout: float) -> socket.socket:
    connected = socket.create_connection((host, port), timeout)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER * 1000)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_QUICKACK"):
        return _Prompt(fileno=connected.detach())
    return connected


@contextlib.contextmanager
def _bounded(transport: paramiko.Transport, label: str, deadline: Deadline) -> Iterator[None]:
    """Close the connection when opening a channel takes past the deadline: paramiko waits for `exec` without limit."""
    timer = threading.Timer(deadline.remaining(), transport.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (paramiko.SSHException, EOFError, OSError) as error:
        if not deadline.remaining():
            raise Unanswered(f"no answer from {label} within {deadline.seconds:g} s", "try again") from error
        if isinstance(error, paramiko.ChannelException):
            raise Unanswered(
                f"{label} refused another session: {error.text}", "raise MaxSessions in its sshd_config, or try again"
            ) from error
        raise ConnectionLost(f"the connection to {label} broke", "try again", detail=repr(error)) from error
    finally:
        timer.cancel()


def _explain(error: Exception, where: str, connection: Connection) -> TransportError:
    """One sentence and its cure for what connecting raised."""
    text = str(error)
    user = connection.user
    if isinstance(error, socket.gaierror):
        return Unreachable(f"the name {connection.host!r} does not resolve", "correct `address` of the host")
    if isinstance(error, paramiko.PasswordRequiredException) or "encrypted" in text.lower():
        return NotPermitted(
            f"the key for {user} on {where} is encrypted and no agent holds it", "run `ssh-add` with it first"
        )
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in text:
        keys = connection.connect_kwargs.get("key_filename") or []
        copy = f"ssh-copy-id -i {shlex.quote(keys[0])} -p {connection.port} {user}@{connection.host}" if keys else ""
        return NotPermitted(
            f"{where} refused every key offered for user {user}",
            f"`{copy}` puts yours there, or set `identity` and `user` of the host"
            if copy
            else "set `identity` and `user` of the host, or load a key into the agent",
        )
    if isinstance(error.__context__, EOFError | ConnectionError) and "banner" in text.lower():
        return Unreachable(
            f"{where} closed the connection before its ssh greeting",
            "is it an ssh server, or a tunnel or firewall on the way that leads nowhere? check `address` and `port`",
            detail=text,
        )
    if isinstance(error, TimeoutError) or "imed out" in text or "banner" in text.lower():
        return Unreachable(f"{where} did not answer in time", "is the host up, and the address right?", detail=text)
    if isinstance(error, ConnectionRefusedError | paramiko.ssh_exception.NoValidConnectionsError):
        return Unreachable(f"{where} refused the connection", "is sshd running there, and the port right?")
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return Unreachable(f"there is no route to {where}", "is the network (VPN?) up?", detail=text)
    if isinstance(error, paramiko.ChannelException):
        return Unreachable(f"the jump host cannot reach {where}: {text}", "check `jump` and `address`", detail=text)
    if "not a valid" in text or isinstance(error, ValueError):
        return NotPermitted(f"the key file for {where} cannot be used: {text}", "correct `identity` of the host")
    return Unreachable(f"the connection to {where} failed: {text or type(error).__name__}", "try again", detail=text)
