"""Runs one command on a channel of a paramiko connection: a single loop sends stdin and drains stdout and stderr."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator

import paramiko

from dflash_ops.transport import ssh_errors
from dflash_ops.transport.base import Deadline

STDERR_KEPT = 64 * 1024


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
                detail = self.stderr.decode("utf-8", "backslashreplace")
                raise ssh_errors.unanswered(self._label, self._deadline.seconds, detail)
            self._wait()
        if channel.exit_status != -1:
            self.status = channel.exit_status
        elif not self._transport.is_active():
            cause = self._transport.get_exception()
            raise ssh_errors.lost(self._label, repr(cause))

    def _read(self, receive: Callable[[int], bytes]) -> bytes:
        """What has come. paramiko widens the window as it reads, which fails when the connection has just broken."""
        try:
            return receive(1 << 16)
        except (EOFError, OSError, paramiko.SSHException) as error:
            raise ssh_errors.lost(self._label, repr(error)) from error

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
