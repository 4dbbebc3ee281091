"""Runs a ProxyCommand at the far end of a socket; paramiko's own does not notice when the command has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from typing import IO


class ProxyCommand:
    """`socket` is the connection; what the command writes on stderr is kept for messages."""

    def __init__(self, command: str) -> None:
        self.socket, theirs = socket.socketpair()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
        shell = os.environ.get("SHELL") or "/bin/sh"  # as OpenSSH runs it
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,
            )

    def said(self) -> str:
        """What it wrote on stderr, once it has ended or a second has passed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._stderr.seek(0)
        return self._stderr.read(1 << 16).decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """End the command."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGHUP)  # as ssh does
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stderr.close()
