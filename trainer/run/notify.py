"""Tells systemd that the trainer lives, by the sd_notify protocol: one datagram per message.

Silent where $NOTIFY_SOCKET is unset, so a run outside systemd needs no switch. A message that can't be delivered is
dropped: the service manager's absence must never end a training run.
Protocol: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import contextlib
import os
import socket
import time


class Notifier:
    """Sends state changes to the service manager; safe to call from any thread."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        # A name that starts with @ lives in Linux's abstract namespace, whose first byte is NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched_process = os.environ.get("WATCHDOG_PID", "")
        ours = watched_process in ("", str(os.getpid()))
        self._watchdog_seconds = _seconds(os.environ.get("WATCHDOG_USEC", "")) if ours else None
        self._period = self._watchdog_seconds or 0.0
        self._last_ping = float("-inf")

    def status(self, text: str) -> None:
        """One line for people, shown by `systemctl status`; line breaks are folded."""
        self._send("STATUS=" + " ".join(text.split()))

    def ready(self) -> None:
        """Start-up is over: the first optimizer step is done."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The process has begun to end of its own accord."""
        self._send("STOPPING=1")

    def expect_silence(self, seconds: float) -> None:
        """Until `expect_progress`, let the watchdog wait for at least `seconds`: work without steps is ahead."""
        if self._watchdog_seconds is not None:
            self._set_period(max(seconds, self._watchdog_seconds))

    def expect_progress(self, seconds: float | None = None) -> None:
        """Steps are being made: the unit's own period holds again, or `seconds` where that is shorter."""
        if self._watchdog_seconds is not None:
            self._set_period(min(self._watchdog_seconds, seconds or self._watchdog_seconds))

    def ping(self) -> None:
        """Proof of progress. Call it where work was done, never from a timer: a stuck worker must stop the pings.

        At most twenty datagrams leave per watchdog period, so that it can be called in a fast loop.
        """
        if self._watchdog_seconds is None:
            return
        now = time.monotonic()
        if now - self._last_ping >= min(self._period, self._watchdog_seconds) / 20:
            self._last_ping = now
            self._send("WATCHDOG=1")

    def _set_period(self, seconds: float) -> None:
        self._period = seconds
        self._send(f"WATCHDOG_USEC={int(seconds * 1e6)}")
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(1.0)  # a full queue in the manager must not hold a step up
            channel.sendto(message.encode(), self._address)


def _seconds(microseconds: str) -> float | None:
    return int(microseconds) / 1e6 if microseconds.isdigit() and int(microseconds) > 0 else None
