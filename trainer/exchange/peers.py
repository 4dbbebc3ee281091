"""Tells the processes of a run of each other's failures and deaths.

Each holds one TCP connection to process 0, from the moment they meet until the run ends. What there is to say goes over
it: what must be alike in all, why a process goes down, that it is done. A process that dies says nothing, but its
kernel closes the connection at that very moment; a host that is gone no longer answers the probes that its peer's
kernel sends. No process sends signs of life itself, so none is taken for dead because it is busy, slow or stopped: the
service manager's watchdog is for those.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

SEND_SECONDS = 5.0  # for a word to find room on its way to a process that does not read
LEAVE_SECONDS = 10.0  # for process 0 to wait for the others at the end
POLL_SECONDS = 0.05
# Probes of an idle connection in seconds: a host that lost its power or network is given up after 5 + 3 * 5.
PROBES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
# Of those who come to the meeting and have not introduced themselves: anyone may come.
STRANGERS = 64
STRANGER_SECONDS = 5.0
HELLO_BYTES = 65536
_RENDEZVOUS_KEY = "meeting"


class PeerError(RuntimeError):
    """Another process of the run failed, died or can't be reached; the message names it."""


class SetupError(RuntimeError):
    """The processes of the run can't find each other, or were started apart; the message says what is to change."""


def rank_and_world_size() -> tuple[int, int]:
    """This process's number, and how many the run has: what torchrun's environment variables say, or 0 of 1.

    Raises:
        SetupError: they say nothing that can be.
    """
    world_size = _variable("WORLD_SIZE", 1, None, default=1)
    rank = _variable("RANK", 0, world_size - 1, default=0 if world_size == 1 else None)
    if world_size > 1:
        _variable("MASTER_PORT", 1, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise SetupError("MASTER_ADDR is not set: give all processes the name or address of the host of RANK 0")
    return rank, world_size


def _variable(name: str, least: int, most: int | None, *, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    number = int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else -1
    if number < least or (most is not None and number > most):
        found = "not set" if text is None else repr(text)
        span = f"from {least} to {most}" if most is not None else f"of at least {least}"
        size = f" when WORLD_SIZE is {most + 1}" if name == "RANK" and most is not None else ""
        raise SetupError(f"{name} is {found}: it must be a whole number {span}{size}, as torchrun sets it")
    return number


class Peers:
    """The run's other processes; none where one process is all."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self._name = f"process {rank} on {socket.gethostname()}"
        self._lines: dict[int, Line] = {}  # by the number of the process at the other end
        self._failure: str | None = None
        self._told = False
        self._lock = threading.RLock()  # a thread may look for failures while another hands something over

    @classmethod
    def connect(cls, store: Any, rank: int, world_size: int, timeout: timedelta) -> Peers:
        """Wait for all processes of the run, which find each other over a torch.distributed store.

        Raises:
            SetupError: they were started as processes of different runs.
            PeerError, OSError: a process died, did not come, or can't be reached.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        peers = cls(rank, world_size)
        try:
            if rank == 0:
                peers._gather(store, deadline)
            else:
                peers._come(store, deadline)
        except BaseException as error:
            peers.tell_failure("meeting the others", error)
            peers.close()
            raise
        return peers

    def _gather(self, store: Any, deadline: float) -> None:
        token = secrets.token_hex()  # tells the run's own processes from whoever else finds the port
        strangers: list[Line] = []
        loopback = _loopback(os.environ["MASTER_ADDR"])
        try:
            with _server(loopback) as server:
                rendezvous = {"host": loopback, "port": server.getsockname()[1], "token": token}
                store.set(_RENDEZVOUS_KEY, json.dumps(rendezvous))
                while len(self._lines) < self._world_size - 1:
                    _let_in(server, strangers)
                    for line in list(strangers):
                        if (hello := line.hello(token)) is not None:
                            strangers.remove(line)
                            self._admit(line, hello)
                    _show_out(strangers)
                    if (failure := self.failure()) is not None:
                        raise PeerError(failure)
                    if time.monotonic() > deadline:
                        missing = [str(number) for number in range(1, self._world_size) if number not in self._lines]
                        raise PeerError(f"process {', '.join(missing)} did not come")
                    time.sleep(POLL_SECONDS)
        finally:
            for line in strangers:
                line.close()
        self._tell({"name": self._name})

    def _admit(self, line: Line, hello: dict[str, Any]) -> None:
        number, world_size = hello["process"], hello["processes"]
        line.name = f"process {number} on {hello['host']}"
        refusal = None
        if world_size != self._world_size:
            refusal = (
                f"{self._name} was started with WORLD_SIZE={self._world_size}, {line.name} with WORLD_SIZE="
                f"{world_size}: start all processes of a run with the same"
            )
        elif (other := self._lines.get(number)) is not None:
            refusal = (
                f"two processes were started with RANK={number}, {other.name} and {line.name}: "
                "give each process of a run a RANK of its own"
            )
        if refusal is None:
            self._lines[number] = line
            return
        with contextlib.suppress(OSError):
            line.write({"refusal": refusal})
        line.close()
        raise SetupError(refusal)

    def _come(self, store: Any, deadline: float) -> None:
        host = os.environ["MASTER_ADDR"]  # by torch's convention process 0's, whoever serves the store
        try:
            rendezvous = json.loads(store.get(_RENDEZVOUS_KEY))
        except RuntimeError as error:
            end = "did not come" if time.monotonic() > deadline else "died before all had met"
            raise PeerError(f"process 0 on {host} {end}") from error
        try:
            line = Line(
                socket.create_connection((rendezvous["host"] or host, rendezvous["port"]), timeout=SEND_SECONDS)
            )
        except ConnectionRefusedError as error:
            raise PeerError(
                f"process 0 on {host} awaits nobody any more: it ended, or RANK={self._rank} was given twice"
            ) from error
        except OSError as error:
            raise SetupError(
                f"process {self._rank} can't reach process 0 at port {rendezvous['port']} of {host} "
                f"({error.strerror or error}): let the hosts of a run reach each other at all ports"
            ) from error
        line.name = f"process 0 on {host}"
        self._lines[0] = line
        hello = {"process": self._rank, "processes": self._world_size, "host": socket.gethostname()}
        with contextlib.suppress(ConnectionError):  # it ended, which reading finds too
            line.write({"token": rendezvous["token"], **hello})
        while (welcome := line.next()) is None:
            if line.broken is not None:
                raise PeerError(f"{line.name} ended while others were awaited")
            if time.monotonic() > deadline:
                raise PeerError(f"{line.name} did not find the others")
            time.sleep(POLL_SECONDS)
        if "refusal" in welcome:
            raise SetupError(welcome["refusal"])
        if "failure" in welcome:
            raise PeerError(welcome["failure"])
        line.name = welcome["name"]

    def share(self, value: Any) -> list[Any]:
        """What each process hands over here, in their order; JSON-able. All must call this, equally often.

        Waits as long as it takes: one process may read or compile for much longer than another.

        Raises:
            PeerError: one failed, died or left.
        """
        if self._rank > 0:
            self._tell({"share": value})
            return list(self._await_share(0))
        everyone = [value, *(self._await_share(number) for number in range(1, self._world_size))]
        self._tell({"share": everyone})
        return everyone

    def _await_share(self, number: int) -> Any:
        line = self._lines.get(number)
        while line is None or not line.shared:
            self.check()
            if line is None or (number not in self._lines and not line.shared):
                raise PeerError(f"process {number} ended before all had begun")
            time.sleep(POLL_SECONDS)
        return line.shared.popleft()

    def check(self) -> None:
        """Raise PeerError if another process is known to have failed or died."""
        if (failure := self.failure()) is not None:
            raise PeerError(failure)

    def failure(self) -> str | None:
        """What brought another process down, if that was seen: its own words, or that it had none. Does not wait."""
        with self._lock:
            for number, line in list(self._lines.items()):
                if self._failure is None:
                    self._failure = self._hear(number, line)
            return self._failure

    def tell_failure(self, worker: str, error: BaseException) -> None:
        """Tell the others why this process goes down, once. Of another's failure process 0 is the one who hears."""
        with self._lock:
            if self._told:
                return
            self._told = True
        if isinstance(error, SetupError):
            self._tell({"refusal": str(error)})
            return
        if isinstance(error, PeerError):
            text = str(error)
        elif isinstance(error, SystemExit):
            text = f"{self._name} was stopped before training began"
        else:
            text = f"{self._name}: {worker} failed: {type(error).__name__}: {error}"
        self._tell({"failure": text[:2000]})

    def leave(self) -> None:
        """Say that this process is done. Process 0, which may serve the store, waits a while for the others."""
        self._tell({"done": True})
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._rank == 0 and self._lines and time.monotonic() < deadline:
            with self._lock:
                for number, line in list(self._lines.items()):
                    self._hear(number, line)
            time.sleep(POLL_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the connections: for those who were told nothing, this process is dead."""
        with self._lock:
            for number in list(self._lines):
                self._lines.pop(number).close()

    def _hear(self, number: int, line: Line) -> str | None:
        """The failure that a process told, or that its silence tells; one that is done is forgotten."""
        while (word := line.next()) is not None:
            if "share" in word:
                line.shared.append(word["share"])
            if "failure" in word or "refusal" in word:
                return str(word.get("failure") or word["refusal"])
            if "done" in word:
                self._lines.pop(number).close()
                return None
        if line.broken is None:
            return None
        self._lines.pop(number).close()
        return f"{line.name} {line.broken}"

    def _tell(self, word: dict[str, Any]) -> None:
        with self._lock:
            for line in self._lines.values():
                with contextlib.suppress(OSError):  # it is gone itself
                    line.write(word)


class Line:
    """One end of a connection that carries JSON objects, one a text line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._words: deque[bytes] = deque()
        self._rest = b""
        self.since = time.monotonic()
        self.name = "a stranger"  # who is at the other end
        self.shared: deque[Any] = deque()  # heard, but not yet asked for
        self.broken: str | None = None  # when no more can come: what is to be said of who was at the other end

    def next(self) -> dict[str, Any] | None:
        """The next word, if it has come whole."""
        if not self._words and self.broken is None:
            self._receive()
        return dict(json.loads(self._words.popleft())) if self._words else None

    def hello(self, token: str) -> dict[str, Any] | None:
        """The first word, if it holds the token; breaks with who says anything else, or never comes to an end."""
        if not self._words and self.broken is None:
            self._receive(HELLO_BYTES - len(self._rest))
        if not self._words:
            if len(self._rest) >= HELLO_BYTES:
                self.broken = "says too much"
            return None
        try:
            word = dict(json.loads(self._words.popleft()))
        except (ValueError, TypeError, RecursionError):
            word = {}
        if word.get("token") == token:
            return word
        self.broken = "is none of the run"
        return None

    def write(self, word: dict[str, Any]) -> None:
        """Send a word; raises OSError where there is no one any more to read it."""
        self._connection.settimeout(SEND_SECONDS)
        try:
            self._connection.sendall(json.dumps(word).encode() + b"\n")
        finally:
            self._connection.setblocking(False)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _receive(self, most: int | None = None) -> None:
        """Take in what has come; `most`: no more bytes than that, for who never stops would never let go."""
        try:
            while received := self._connection.recv(most or 65536):
                self._rest += received
                if most is not None:
                    break
            else:
                self.broken = "died without a word"
        except BlockingIOError:
            pass
        except ConnectionError:
            self.broken = "died without a word"
        except OSError as error:
            self.broken = f"can't be reached any more: {error.strerror or error}"
        *whole, self._rest = self._rest.split(b"\n")
        self._words.extend(whole)


def _let_in(server: socket.socket, strangers: list[Line]) -> None:
    """Take in who has come, as many as may stay."""
    for _ in range(STRANGERS):
        try:
            connection = server.accept()[0]
        except OSError:  # nobody else has come, or is gone again, or finds no descriptor free: look again later
            return
        try:
            strangers.append(Line(connection))
        except OSError:
            connection.close()


def _show_out(strangers: list[Line]) -> None:
    """Part with those who said the wrong thing, or nothing for long; and with the oldest where there are too many."""
    oldest = time.monotonic() - STRANGER_SECONDS
    crowd = len(strangers) - STRANGERS
    for place, line in enumerate(list(strangers)):
        if line.broken is not None or line.since < oldest or place < crowd:
            strangers.remove(line)
            line.close()


def _loopback(address: str) -> str | None:
    """The loopback address that MASTER_ADDR is, as written: what a name resolves to may differ from host to host."""
    if address.lower() == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return address
    return None


def _server(loopback: str | None) -> socket.socket:
    """A listening socket at a port of its own: at this loopback address, or at all, over IPv6 too where there is."""
    both = loopback is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or (loopback is not None and ":" in loopback) else socket.AF_INET
    server = socket.create_server((loopback or "", 0), family=family, backlog=1024, dualstack_ipv6=both)
    server.setblocking(False)
    return server
