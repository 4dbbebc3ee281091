"""Runs programs on this machine, by /bin/sh, through the same command line, stdin and frames."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator

from dflash_ops.transport.base import Deadline, Unanswered
from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.program import BOOTSTRAP

STDERR_KEPT = 64 * 1024


class LocalExchange:
    """A child process whose three pipes are served by one selector."""

    def __init__(
        self, argv: list[str], label: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool
    ) -> None:
        self._label = label
        self.stderr = b""
        self.status: int | None = None
        self._stdin = stdin
        self._deadline = deadline
        self._keep_stdin = keep_stdin
        self._child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def __iter__(self) -> Iterator[bytes]:
        source, out, err = self._child.stdin, self._child.stdout, self._child.stderr
        assert source is not None
        assert out is not None
        assert err is not None
        pending = b""
        with selectors.DefaultSelector() as selector:
            for stream, events in (
                (source, selectors.EVENT_WRITE),
                (out, selectors.EVENT_READ),
                (err, selectors.EVENT_READ),
            ):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, events)
            open_outputs = 2
            while open_outputs:
                ready = selector.select(self._deadline.remaining())
                if not ready and not self._deadline.remaining():
                    raise Unanswered(f"no answer from {self._label} within {self._deadline.seconds:g} s", "try again")
                for key, _ in ready:
                    if key.fileobj is source:
                        pending = pending or next(self._stdin, b"")
                        try:
                            pending = pending[os.write(source.fileno(), pending) :] if pending else b""
                            done = not pending and (pending := next(self._stdin, b"")) == b""
                        except BrokenPipeError:
                            done = True
                        if done:
                            selector.unregister(source)
                            if not self._keep_stdin:
                                source.close()
                        continue
                    stream = out if key.fileobj is out else err
                    data = os.read(stream.fileno(), 1 << 16)
                    if not data:
                        selector.unregister(stream)
                        open_outputs -= 1
                    elif stream is out:
                        yield data
                    else:
                        self.stderr = (self.stderr + data)[-STDERR_KEPT:]
        self.status = self._child.wait(max(1.0, self._deadline.remaining()))

    def close(self) -> None:
        """Let the child see that nobody listens, as a closed ssh channel would; end it if it does not."""
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(3)
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


class LocalHost:
    """This machine as a host."""

    label = "this machine"

    def exchange(self, command: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool) -> LocalExchange:
        """See Host.exchange."""
        return LocalExchange(["/bin/sh", "-c", command], self.label, stdin, deadline, keep_stdin=keep_stdin)

    def close(self) -> None:
        """Nothing is held between exchanges."""


def local_transport() -> FramedTransport:
    """A transport whose container is this machine."""
    return FramedTransport(LocalHost(), BOOTSTRAP, lambda text, status: None)
