"""How do the processes of a run hear of each other, and of a death?

Each holds one TCP connection to process 0, from the moment they meet until the run ends. What there is to say goes over
it: how a process is set up, why it goes down, that it is done. A process that dies says nothing, but its kernel closes
the connection at that very moment; a host that is gone no longer answers the probes that its peer's kernel sends. No
process sends signs of life itself, so none is taken for dead because it is busy, slow or stopped: the service manager's
watchdog is for those.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections import deque
from datetime import timedelta
from typing import Any

SEND_SECONDS = 5.0  # for a word to find room on its way to a process that does not read
LEAVE_SECONDS = 10.0  # for process 0 to wait for the others at the end
POLL_SECONDS = 0.05
# Probes of an idle connection in seconds: a host that lost its power or network is given up after 5 + 3 * 5.
PROBES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_MEETING_KEY = "meeting"


class PeerError(RuntimeError):
    """Another process of the run failed, died or can't be reached; the message names it."""


class Peers:
    """The run's other processes; none where one process is all."""

    def __init__(self, process: int = 0, host: str = "") -> None:
        self._process, self._name = process, f"process {process} on {host}"
        self._lines: dict[str, Line] = {}  # by the name of who is at the other end
        self._failure: str | None = None
        self._told = False

    @classmethod
    def meet(
        cls, store: Any, process: int, processes: int, setup: dict[str, Any], timeout: timedelta
    ) -> tuple[Peers, list[dict[str, Any]]]:
        """Wait for all processes of the run, which find each other over a torch.distributed store.

        Args: setup: what the others are to know of this process; JSON-able.

        Returns:
            The peers, and the setup of every process, in their order.

        Raises:
            PeerError, OSError: a process died, did not come, or can't be reached.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        peers = cls(process, socket.gethostname())
        try:
            if process == 0:
                return peers, peers._gather(store, processes, setup, deadline)
            return peers, peers._come(store, setup, deadline)
        except BaseException as error:
            peers.tell_failure("meeting the others", error)
            peers.close()
            raise

    def _gather(self, store: Any, processes: int, setup: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        token = secrets.token_hex()  # tells the run's own processes from whoever else finds the port
        setups = {0: setup}
        strangers: list[Line] = []
        with _server() as server:
            store.set(_MEETING_KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
            while len(setups) < processes:
                with contextlib.suppress(BlockingIOError):
                    strangers.append(Line(server.accept()[0]))
                for line in list(strangers):
                    if (hello := line.hello(token)) is not None:
                        strangers.remove(line)
                        setups[hello["process"]] = hello["setup"]
                        self._lines[f"process {hello['process']} on {hello['host']}"] = line
                if (failure := self.failure()) is not None:
                    raise PeerError(failure)
                if time.monotonic() > deadline:
                    missing = [str(number) for number in range(processes) if number not in setups]
                    raise PeerError(f"process {', '.join(missing)} did not come")
                time.sleep(POLL_SECONDS)
        for line in strangers:
            line.close()
        everyone = [setups[number] for number in range(processes)]
        self._tell({"name": self._name, "everyone": everyone})
        return everyone

    def _come(self, store: Any, setup: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        meeting = json.loads(store.get(_MEETING_KEY))
        host = os.environ["MASTER_ADDR"]  # by torch's convention process 0's, whoever serves the store
        line = Line(socket.create_connection((host, meeting["port"]), timeout=SEND_SECONDS))
        line.write({"token": meeting["token"], "process": self._process, "host": socket.gethostname(), "setup": setup})
        self._lines[f"process 0 on {host}"] = line
        while (welcome := line.next()) is None:
            if line.broken is not None:
                raise PeerError(f"process 0 on {host} ended while others were awaited")
            if time.monotonic() > deadline:
                raise PeerError(f"process 0 on {host} did not find the others")
            time.sleep(POLL_SECONDS)
        if "failure" in welcome:
            raise PeerError(welcome["failure"])
        self._lines = {welcome["name"]: line}
        return list(welcome["everyone"])

    def failure(self) -> str | None:
        """What brought another process down, if that was seen: its own words, or that it had none. Does not wait."""
        for name, line in list(self._lines.items()):
            if self._failure is None:
                self._failure = self._hear(name, line)
        return self._failure

    def tell_failure(self, worker: str, error: BaseException) -> None:
        """Tell the others why this process goes down, once. Of another's failure process 0 is the one who hears."""
        if self._told:
            return
        self._told = True
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
        while self._process == 0 and self._lines and time.monotonic() < deadline:
            for name, line in list(self._lines.items()):
                self._hear(name, line)
            time.sleep(POLL_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the connections: for those who were told nothing, this process is dead."""
        for name in list(self._lines):
            self._lines.pop(name).close()

    def _hear(self, name: str, line: Line) -> str | None:
        """The failure that a process told, or that its silence tells; one that is done is forgotten."""
        while (word := line.next()) is not None:
            if "failure" in word:
                return str(word["failure"])
            if "done" in word:
                self._lines.pop(name).close()
                return None
        if line.broken is None:
            return None
        self._lines.pop(name).close()
        return f"{name} {line.broken}"

    def _tell(self, word: dict[str, Any]) -> None:
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
        self.broken: str | None = None  # when no more can come: what is to be said of who was at the other end

    def next(self) -> dict[str, Any] | None:
        """The next word, if it has come whole."""
        if not self._words and self.broken is None:
            self._receive()
        return dict(json.loads(self._words.popleft())) if self._words else None

    def hello(self, token: str) -> dict[str, Any] | None:
        """The next word, if it holds the token."""
        try:
            word = self.next()
        except (ValueError, TypeError):
            return None
        return word if word is not None and word.get("token") == token else None

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

    def _receive(self) -> None:
        try:
            while received := self._connection.recv(65536):
                self._rest += received
            self.broken = "died without a word"
        except BlockingIOError:
            pass
        except ConnectionError:
            self.broken = "died without a word"
        except OSError as error:
            self.broken = f"can't be reached any more: {error.strerror or error}"
        *whole, self._rest = self._rest.split(b"\n")
        self._words.extend(whole)


def _server() -> socket.socket:
    """A listening socket at a port of its own, over IPv6 too where the machine has it."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    server.setblocking(False)
    return server
