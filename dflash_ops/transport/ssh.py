"""Reaches a host by paramiko, through Fabric connections whose weak points are closed here and nowhere else.

Fabric trusts unknown host keys (here: refused, `dflash trust` asks), reads the ssh configuration in its own way (here:
the ssh client is asked), resolves ProxyJump with such connections (here: every hop is built the same strict way),
notices no dead peer (here: keepalive and TCP_USER_TIMEOUT), may wait an hour for a channel and for ever for the answer
to `exec` (here: a deadline on every call), and reads stdout before stderr (here: one loop drains both).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko
from fabric import Config, Connection

from dflash_ops.inventory.models import Inventory
from dflash_ops.transport import known_hosts, ssh_errors
from dflash_ops.transport.base import (
    Deadline,
    Misconfigured,
    NotPermitted,
    TransportError,
    Unanswered,
)
from dflash_ops.transport.known_hosts import UnknownKey
from dflash_ops.transport.proxy_command import ProxyCommand
from dflash_ops.transport.ssh_config import Hop, way
from dflash_ops.transport.ssh_exchange import SshExchange
from dflash_ops.transport.ssh_keys import Keys

KEEPALIVE = 5  # seconds of silence after which a packet asks for an acknowledgement
DEAD_AFTER = 20  # seconds without acknowledgement after which the kernel gives the connection up
OTHER_CONNECTION_AFTER = 0.5  # seconds that a session which ends may keep the next one out

# paramiko logs what it also raises.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


Accept = Callable[[UnknownKey], bool]


class _Strict(paramiko.MissingHostKeyPolicy):
    """Judges host keys as OpenSSH does. Unknown ones are refused, unless `accept` takes them; then they are written."""

    def __init__(self, hop: Hop, accept: Accept | None) -> None:
        self._hop = hop
        self._accept = accept
        self._lines = list(known_hosts.read(hop.known_files))
        self.kinds = known_hosts.kinds(self._lines, hop.known_as, hop.bare)

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """See paramiko; the client itself holds no keys, so it is asked for each. Raises NotPermitted."""
        hop = self._hop
        shown = UnknownKey(hop.known_as, key.get_name(), key.get_base64(), hop.known_hosts[0])
        judgement, path = known_hosts.judge(self._lines, hop.known_as, hop.bare, shown.kind, shown.base64)
        if judgement == "revoked":
            raise ssh_errors.revoked_key(hop, path)
        if judgement == "changed":
            raise ssh_errors.changed_key(hop, shown.kind, shown.fingerprint, path)
        if judgement == "unknown":
            if self._accept is None or not self._accept(shown):
                raise ssh_errors.unknown_key(hop, shown.kind, shown.fingerprint)
            known_hosts.append(shown)


class _Said(logging.Handler):
    """What the server said while connecting: paramiko logs it and raises something else."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.early: list[str] = []  # lines before the greeting
        self.greeted = False
        self.disconnect = ""
        self.proxy: ProxyCommand | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Banner: "):
            self.early.append(text.removeprefix("Banner: ").strip())
        elif text.startswith("Connected (version "):
            self.greeted = True
        elif text.startswith("Disconnect (code "):
            self.disconnect = text.partition("): ")[2].strip()


class SshHost:
    """A host of the inventory. Its connection is opened at the first exchange and serves all that follow."""

    def __init__(self, name: str, inventory: Inventory, accept: Accept | None = None) -> None:
        self.name = name
        self.label = name
        self._entry = inventory.hosts[name]
        self._inventory = inventory
        self._accept = accept
        self._connections: list[Connection] = []  # the way to the host, itself last
        self._proxy: ProxyCommand | None = None  # of the first hop
        self._full_proxies: list[ProxyCommand] = []
        self._full: list[Connection] = []  # connections whose server opens no more sessions; those open go on

    # ---- connecting ----------------------------------------------------------------------------------------

    def connect(self) -> paramiko.Transport:
        """The live connection, opened when there is none. Raises TransportError."""
        if self._connections and all(hop.is_connected for hop in self._connections):
            transport: paramiko.Transport = self._connections[-1].transport
            return transport
        return ssh_errors.patiently(self._connect)

    def _connect(self) -> paramiko.Transport:
        self._close_current()
        gateway: Connection | None = None
        for hop in way(self.name, self._inventory):
            gateway = self._open(hop, gateway)
        assert gateway is not None
        transport: paramiko.Transport = gateway.transport
        return transport

    def _open(self, hop: Hop, gateway: Connection | None) -> Connection:
        if hop.only_openssh:
            raise Misconfigured(
                f"the ssh configuration sets {', '.join(hop.only_openssh)} for {hop.where}, which only `ssh` follows",
                f"set `via: openssh` for host {self.name}",
            )
        policy = _Strict(hop, self._accept)
        said = _Said()
        connection = Connection(
            hop.host,
            user=hop.user,
            port=hop.port,
            config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),  # all is resolved, and none of Fabric's files
            gateway=gateway or False,
            connect_timeout=None,
        )
        connection.connect_timeout = None  # the socket is connected here
        limit = hop.entry.connect_timeout
        connection.connect_kwargs = {
            "banner_timeout": limit,
            "auth_timeout": limit,
            "channel_timeout": limit,
            "auth_strategy": Keys(hop),
            "transport_factory": lambda sock, **options: _transport(sock, policy.kinds, said, options),
        }
        connection.client.set_missing_host_key_policy(policy)
        self._connections.append(connection)
        timer: threading.Timer | None = None
        try:
            if gateway is None and hop.proxy_command is None:
                connection.connect_kwargs["sock"] = _socket(hop)
            else:
                connection.connect_kwargs["timeout"] = limit
            if gateway is None and hop.proxy_command is not None:
                self._proxy = said.proxy = ProxyCommand(hop.proxy_command)
                connection.connect_kwargs["sock"] = said.proxy.socket
            # Whatever paramiko waits for without a limit of its own ends when its socket closes.
            timer = threading.Timer(3 * limit, connection.client.close)
            timer.daemon = True
            timer.start()
            connection.open()
        except TransportError:
            raise
        except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
            raise ssh_errors.cured(_explain(error, hop, said), hop) from error
        finally:
            if timer is not None:
                timer.cancel()
            logger = logging.getLogger(_channel(said))
            logger.setLevel(logging.CRITICAL)
            logger.removeHandler(said)
        connection.transport.set_keepalive(KEEPALIVE)
        return connection

    # ---- exchanging ----------------------------------------------------------------------------------------

    def exchange(self, command: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool) -> SshExchange:
        """See Host.exchange."""
        transport, channel = self._session(command, deadline)
        exchange = SshExchange(self.label, transport, channel, stdin, deadline, keep_stdin=keep_stdin)
        exchange.begin()
        return exchange

    def _session(self, command: str, deadline: Deadline) -> tuple[paramiko.Transport, paramiko.Channel]:
        """A channel that runs the command. Where the server's MaxSessions are in use: wait, then connect anew."""
        begin = time.monotonic()
        while True:
            transport = self.connect()
            try:
                with _bounded(transport, self.label, deadline):
                    channel = transport.open_session(timeout=max(0.1, deadline.remaining()))
                    try:
                        channel.exec_command(command)
                    except paramiko.SSHException as error:
                        if not transport.is_active():
                            raise
                        raise NotPermitted(
                            f"{self.label} does not let this user run commands",
                            "is the key, or the user, confined there (ForceCommand, internal-sftp)?",
                        ) from error
                return transport, channel
            except paramiko.ChannelException as error:
                passed = time.monotonic() - begin
                if passed > min(self._entry.connect_timeout, deadline.seconds) or not deadline.remaining():
                    raise ssh_errors.no_session(self.label, error.text) from error
                if passed > OTHER_CONNECTION_AFTER and not self._full:
                    self._full, self._connections = self._connections, []
                    self._full_proxies += [self._proxy] if self._proxy else []
                    self._proxy = None
            time.sleep(0.05)

    def close(self) -> None:
        """Close the connection and those of its jump hosts."""
        self._close_current()
        _close(self._full)
        for proxy in self._full_proxies:
            proxy.close()
        self._full_proxies.clear()

    def _close_current(self) -> None:
        _close(self._connections)
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None


def _close(connections: list[Connection]) -> None:
    while connections:
        with contextlib.suppress(Exception):
            connections.pop().client.close()


def _channel(said: _Said) -> str:
    return f"paramiko.dflash-{id(said)}"


def _transport(sock: Any, kinds: list[str], said: _Said, options: dict[str, Any]) -> paramiko.Transport:
    """Prefers the kinds of host key that are known, as OpenSSH does, and hears what the server says."""
    transport = paramiko.Transport(sock, **options)
    security = transport.get_security_options()
    rsa = ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")
    wanted = [name for kind in kinds for name in (rsa if kind == "ssh-rsa" else (kind,))]
    offered = tuple(security.key_types)
    first = tuple(dict.fromkeys(name for name in wanted if name in offered))
    security.key_types = first + tuple(name for name in offered if name not in first)
    transport.set_log_channel(_channel(said))
    logger = logging.getLogger(_channel(said))
    logger.setLevel(logging.DEBUG)
    logger.addHandler(said)
    return transport


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


def _socket(hop: Hop) -> socket.socket:
    """A connection to the first of the host's addresses that takes one."""
    limit = hop.entry.connect_timeout
    last: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(hop.host, hop.port, hop.family, socket.SOCK_STREAM):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(limit)
            if hop.bind:
                connected.bind((hop.bind, 0))
            connected.connect(address)
        except OSError as error:
            connected.close()
            last = error
            continue
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER * 1000)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_QUICKACK"):
            return _Prompt(fileno=connected.detach())
        return connected
    raise last or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


@contextlib.contextmanager
def _bounded(transport: paramiko.Transport, label: str, deadline: Deadline) -> Iterator[None]:
    """Close the connection when opening a channel takes past the deadline: paramiko waits for `exec` without limit."""
    timer = threading.Timer(deadline.remaining(), transport.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    except paramiko.ChannelException:
        raise
    except (paramiko.SSHException, EOFError, OSError) as error:
        if not deadline.remaining():
            raise Unanswered(f"no answer from {label} within {deadline.seconds:g} s", "try again") from error
        raise ssh_errors.lost(label, repr(error)) from error
    finally:
        timer.cancel()


def _explain(error: Exception, hop: Hop, said: _Said) -> TransportError:
    """One sentence and its cure for what connecting raised."""
    text = str(error)
    if isinstance(error, socket.gaierror):
        return ssh_errors.unresolved(hop)
    if "Too many authentication failures" in said.disconnect:
        return ssh_errors.too_many_keys(hop, said.disconnect)
    if said.disconnect:
        return ssh_errors.failed(hop, f"it said: {said.disconnect}")
    timed_out = any(isinstance(each, TimeoutError) for each in (error, error.__context__))
    if said.proxy is not None and not said.greeted and not timed_out:
        return ssh_errors.proxy_ended(hop, said.proxy.said())
    if "banner" in text.lower() and (said.early or isinstance(error.__context__, EOFError | ConnectionError)):
        return ssh_errors.closed_early(hop, " ".join(said.early))
    if isinstance(error, TimeoutError) or "imed out" in text or "timeout" in text or "banner" in text.lower():
        return ssh_errors.silent(hop, text)
    if isinstance(error, ConnectionRefusedError | paramiko.ssh_exception.NoValidConnectionsError):
        return ssh_errors.refused_connection(hop)
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return ssh_errors.no_route(hop, text)
    if isinstance(error, paramiko.ChannelException):
        return ssh_errors.jump_cannot_reach(hop, text)
    return ssh_errors.failed(hop, text or type(error).__name__)
