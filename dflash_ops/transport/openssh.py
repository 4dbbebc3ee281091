"""Reaches a host by the `ssh` client of this machine, for what paramiko cannot do: FIDO keys, GSSAPI, ControlMaster.

One `ssh -M -N` process holds the connection and each exchange is a session of it; a live ControlMaster of the user's
own is used in its place. Host keys are as strict as with paramiko, and the same errors are raised: what ssh logs (to
files, by -v and -E, apart from what the host writes) is read for them. Where the server's MaxSessions is in use, the
client itself opens another connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_ops.inventory.models import Inventory
from dflash_ops.transport import known_hosts, ssh_errors
from dflash_ops.transport.base import Deadline, Misconfigured, TransportError, Unanswered
from dflash_ops.transport.hosts import Accept
from dflash_ops.transport.known_hosts import UnknownKey
from dflash_ops.transport.local import LocalExchange
from dflash_ops.transport.openssh_log import explain, explain_session, greeted, logged_in
from dflash_ops.transport.ssh_config import Hop, client_arguments, way

# Ends ssh and removes its folder ($0) when this process is gone: the pipe on stdin closes then, whatever killed us.
_HOLD = (
    'exec 3<&0; "$@" </dev/null 3<&- & ssh=$!; (read -r _ <&3; rm -rf "$0"; kill $ssh) 2>/dev/null & '
    "watcher=$!; exec 3<&-; wait $ssh; status=$?; kill $watcher 2>/dev/null; exit $status"
)
FIXED = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "VerifyHostKeyDNS": "no",
    "ControlPersist": "no",
    "RemoteCommand": "none",
    "PermitLocalCommand": "no",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
    "EscapeChar": "none",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
}


class OpenSshHost:
    """A host of the inventory. Its connection is opened at the first exchange and serves all that follow."""

    def __init__(self, name: str, inventory: Inventory, accept: Accept | None = None) -> None:
        self.name = name
        self.label = name
        self._inventory = inventory
        self._accept = accept
        self._hops: list[Hop] = []
        self._folder: Path | None = None  # holds the control socket and ssh's logs
        self._master: subprocess.Popen[bytes] | None = None
        self._theirs = False  # the connection is a ControlMaster of the user's
        self._exchanges = 0

    # ---- connecting ----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connection, unless it stands. Raises TransportError."""
        if self.alive():
            return
        for _ in range(20):  # one unknown key after the other may be accepted
            try:
                return ssh_errors.patiently(self._connect)
            except ssh_errors.UnknownHostKey as error:
                if self._accept is None:
                    raise
                key = self._shown_key(error.hop)
                if key is None or not self._accept(key):
                    raise
                known_hosts.append(key)
        raise AssertionError("each round knows one more key")

    def alive(self) -> bool:
        """Whether the connection stands."""
        if self._theirs:
            return self._their_master_lives()
        return self._master is not None and self._master.poll() is None

    def _connect(self) -> None:
        self.close()
        if shutil.which("ssh") is None:
            raise Misconfigured(
                f"host {self.name} has `via: openssh`, and there is no `ssh` on this machine",
                "install OpenSSH's client, or remove `via`",
            )
        self._hops = way(self.name, self._inventory)
        self._folder = Path(tempfile.mkdtemp(prefix="dflash-"))
        self._theirs = self._their_master_lives()
        if self._theirs:
            return
        argv = self._client(len(self._hops) - 1, ["-M", "-S", str(self._folder / "s"), "-N"], "master")
        with (self._folder / "stderr").open("wb") as stderr:
            self._master = subprocess.Popen(
                ["/bin/sh", "-c", _HOLD, str(self._folder), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            self._wait_for_master(self._master, self._folder / "s")
        except TransportError:
            self.close()
            raise

    def _wait_for_master(self, master: subprocess.Popen[bytes], socket: Path) -> None:
        """Until its control socket is there: the login is done. Each hop has its time to greet, and to let us in."""
        stage, begin = -1, time.monotonic()
        while not socket.exists():
            if master.poll() is not None:
                raise explain(self._hops, self._logs("master"), self._proxy_said(socket.with_name("stderr")))
            logs = self._logs("master")
            reached = sum(mark(log) for log in logs for mark in (greeted, logged_in))
            if reached != stage:
                stage, begin = reached, time.monotonic()
            at = next((i for i, log in enumerate(logs) if not logged_in(log)), len(logs) - 1)
            limit = self._hops[at].entry.connect_timeout * (2 if greeted(logs[at]) else 1)
            if time.monotonic() - begin > limit:
                raise ssh_errors.cured(ssh_errors.silent(self._hops[at], logs[at]), self._hops[at])
            time.sleep(0.02)

    def _proxy_said(self, stderr: Path) -> str:
        """What a ProxyCommand wrote; it may close the connection before it says why."""
        end = time.monotonic() + 0.5
        while self._hops[0].proxy_command is not None and not stderr.stat().st_size and time.monotonic() < end:
            time.sleep(0.02)
        return stderr.read_text(encoding="utf-8", errors="replace")

    def _their_master_lives(self) -> bool:
        path = self._hops[-1].control_path
        if path is None or not Path(path).exists():
            return False
        argv = self._client(len(self._hops) - 1, ["-O", "check"], "check")
        with contextlib.suppress(subprocess.TimeoutExpired):
            answer = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False)
            return answer.returncode == 0
        return False

    def _shown_key(self, hop: Hop) -> UnknownKey | None:
        """The key that a host shows, fetched without a login to it."""
        at = next(i for i, each in enumerate(self._hops) if each is hop)
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="dflash-"))
        shown = self._folder / "shown"
        options = {
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": _quoted(shown),
            "GlobalKnownHostsFile": "/dev/null",
            "PreferredAuthentications": "none",
            "HashKnownHosts": "no",
            "ControlPath": "none",
        }
        argv = self._client(
            at, [word for key, value in options.items() for word in ("-o", f"{key}={value}")], "key", "true"
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            limit = 3 * hop.entry.connect_timeout * (at + 1)
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False)
        for line in known_hosts.read([shown]):
            return UnknownKey(hop.known_as, line.kind, line.base64, hop.known_hosts[0])
        return None

    # ---- the client's command line -------------------------------------------------------------------------

    def _client(self, at: int, words: list[str], purpose: str, command: str | None = None) -> list[str]:
        """`ssh` to hop number `at`, through those before it. `words` go first: the first value of an option counts."""
        hop = self._hops[at]
        assert self._folder is not None
        argv = ["ssh", *words, "-v", "-E", str(self._folder / f"{purpose}-{at}.log")]
        argv += client_arguments(hop.entry, self._inventory)
        options = {**FIXED, "ConnectTimeout": str(max(1, math.ceil(hop.entry.connect_timeout)))}
        if hop.entry.known_hosts is not None:
            options["UserKnownHostsFile"] = _quoted(hop.known_hosts[0])
        if hop.entry.identity is not None:
            options |= {"IdentityFile": _quoted(hop.identities[0]), "IdentitiesOnly": "yes"}
        if at > 0:
            jump = self._client(at - 1, ["-W", f"[{hop.host}]:{hop.port}"], purpose)
            options["ProxyCommand"] = shlex.join(jump).replace("%", "%%")
        if "-M" not in words:
            options["ControlMaster"] = "no"
        argv += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return [*argv, "--", hop.asked, *([command] if command is not None else [])]

    def _logs(self, purpose: str) -> list[str]:
        """What ssh logged, hop by hop."""
        assert self._folder is not None
        logs = []
        for at in range(len(self._hops)):
            try:
                logs.append((self._folder / f"{purpose}-{at}.log").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                logs.append("")
        return logs

    # ---- exchanging ----------------------------------------------------------------------------------------

    def exchange(
        self, command: str, stdin: Iterator[bytes], deadline: Deadline, *, keep_stdin: bool
    ) -> OpenSshExchange:
        """See Host.exchange."""
        self.connect()
        assert self._folder is not None
        self._exchanges += 1
        purpose = f"exchange{self._exchanges}"
        words = [] if self._theirs else ["-S", str(self._folder / "s")]
        argv = self._client(len(self._hops) - 1, words, purpose, command)
        return OpenSshExchange(self, argv, purpose, stdin, deadline, keep_stdin=keep_stdin)

    def end_of(self, purpose: str) -> TransportError | None:
        """Why a session ended with ssh's own exit code; None: the command's own code was the same."""
        error = explain_session(self._hops, self._logs(purpose), self.label)
        end = time.monotonic() + 1  # the connection may be about to break
        while error is None and self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        return error if self.alive() else error or ssh_errors.lost(self.label, "\n".join(self._logs("master")))

    def close(self) -> None:
        """Close the connection, and forget ssh's logs."""
        if self._master is not None:
            assert self._master.stdin is not None
            with contextlib.suppress(OSError):
                self._master.stdin.close()
            try:
                self._master.wait(3)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._master.pid, signal.SIGKILL)
                self._master.wait()
            self._master = None
        self._theirs = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class OpenSshExchange(LocalExchange):
    """One session of the connection."""

    def __init__(
        self,
        host: OpenSshHost,
        argv: list[str],
        purpose: str,
        stdin: Iterator[bytes],
        deadline: Deadline,
        *,
        keep_stdin: bool,
    ) -> None:
        self._host = host
        self._purpose = purpose
        super().__init__(argv, host.label, stdin, deadline, keep_stdin=keep_stdin)

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from super().__iter__()
        except Unanswered as error:
            detail = self.stderr.decode("utf-8", "backslashreplace")
            raise ssh_errors.unanswered(self._label, self._deadline.seconds, detail) from error
        if self.status == 255:  # ssh's own, or the command's
            cause = self._host.end_of(self._purpose)
            if cause is not None:
                raise cause

    def close(self) -> None:
        """End the session: the command's stdin ends, its output goes nowhere."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGTERM)
        super().close()


def _quoted(path: Path) -> str:
    """As an option's value: spaces kept, no tokens."""
    return '"' + str(path).replace("%", "%%") + '"'
