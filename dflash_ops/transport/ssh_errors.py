"""Says in one sentence, with its cure, why a host was not reached; the same for both ssh transports."""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from dflash_ops.text import visible
from dflash_ops.transport.base import ConnectionLost, NotPermitted, TransportError, Unanswered, Unreachable
from dflash_ops.transport.ssh_config import Hop

T = TypeVar("T")


class Busy(Unreachable):
    """The server takes no more connections at the moment: worth `patience` seconds of trying."""

    patience: float = 0.0


class UnknownHostKey(NotPermitted):
    """No known_hosts file holds the key of `hop`."""

    hop: Hop


def cured(error: TransportError, hop: Hop) -> TransportError:
    """With the cure that the inventory knows for a host that is down."""
    if isinstance(error, Unreachable):
        error.hint = hop.entry.cure or error.hint
    return error


def patiently(attempt: Callable[[], T]) -> T:
    """The attempt's result; it is repeated while the server is busy, as long as that is worth it."""
    begin = time.monotonic()
    pause = 0.1
    while True:
        try:
            return attempt()
        except Busy as error:
            wait = random.uniform(pause, 2 * pause)  # those who were refused together do not come back together
            if time.monotonic() + wait - begin > error.patience:
                raise
        time.sleep(wait)
        pause = min(1.0, 2 * pause)


def unknown_key(hop: Hop, kind: str, fingerprint: str) -> UnknownHostKey:
    """No known_hosts file holds the key."""
    error = UnknownHostKey(
        f"the host key of {hop.known_as} is not known ({kind} {fingerprint})",
        f"compare it with the host's own and run `dflash trust {hop.name}`",
    )
    error.hop = hop
    return error


def changed_key(hop: Hop, kind: str, fingerprint: str, path: Path | None) -> NotPermitted:
    """A known_hosts file holds another key of the same kind."""
    remove = f"ssh-keygen -f {shlex.quote(str(path or hop.known_hosts[0]))} -R {shlex.quote(hop.known_as)}"
    return NotPermitted(
        f"the host key of {hop.known_as} has CHANGED (now {kind} {fingerprint}): "
        "somebody may be in between, or the host was set up anew",
        f"if you know why, run `{remove}` and then `dflash trust {hop.name}`",
    )


def revoked_key(hop: Hop, path: Path | None) -> NotPermitted:
    """A known_hosts file revokes the key."""
    return NotPermitted(
        f"the host key of {hop.where} is revoked", f"see the @revoked line in {path or hop.known_hosts[0]}"
    )


def unresolved(hop: Hop) -> Unreachable:
    """DNS."""
    return Unreachable(f"the name {hop.host!r} does not resolve", "correct `address` of the host")


def encrypted_key(hop: Hop) -> NotPermitted:
    """Nobody is asked for passphrases."""
    return NotPermitted(
        f"the key for {hop.user} on {hop.where} is encrypted and no agent holds it", "run `ssh-add` with it first"
    )


def refused_keys(hop: Hop, offered: Iterable[Path] = (), detail: str = "") -> NotPermitted:
    """The server refused all keys, or none could be offered."""
    keys = list(offered)
    copy = ""
    if keys:
        copy = f"ssh-copy-id -i {shlex.quote(str(keys[0]))} -p {hop.port} {hop.user}@{hop.host}"
    return NotPermitted(
        f"{hop.where} refused every key offered for user {hop.user}",
        (f"`{copy}` puts yours there, or set `identity` and `user` of the host" if copy else "")
        or "set `identity` and `user` of the host, or load a key into the agent" + _or_openssh(hop),
        detail=detail,
    )


def too_many_keys(hop: Hop, said: str) -> NotPermitted:
    """The server counts the keys that it refused."""
    return NotPermitted(
        f"{hop.where} ended the login of {hop.user} after too many keys (its limit is MaxAuthTries): {said}",
        "name the right key by `identity` of the host: it is offered first and no others of the agent after it",
    )


def second_factor(hop: Hop, methods: Iterable[str]) -> NotPermitted:
    """The key was taken and is not enough."""
    return NotPermitted(
        f"{hop.where} took the key of {hop.user} and asks for more ({', '.join(methods)})",
        "open a ControlMaster connection to it by `ssh` and set `via: openssh` for the host",
    )


def closed_early(hop: Hop, said: str) -> Busy:
    """The connection was taken and closed before the greeting."""
    if "MaxStartups" in said or "Not allowed at this time" in said:
        limit = "MaxStartups" if "MaxStartups" in said else "PerSourcePenalties"
        error = Busy(
            f"{hop.where} takes no more logins at the moment: its sshd's limit {limit} is reached",
            f"try again, or raise {limit} in its sshd_config",
            detail=said,
        )
        error.patience = hop.entry.connect_timeout
        return error
    words = f" and said: {said}" if said else ""
    error = Busy(
        f"{hop.where} closed the connection before its ssh greeting{words}",
        "is it an ssh server, or a tunnel or firewall on the way that leads nowhere? check `address` and `port`; "
        "an sshd with too many logins at once (MaxStartups) does so too",
    )
    error.patience = min(2.0, hop.entry.connect_timeout)
    return error


def silent(hop: Hop, detail: str = "") -> Unreachable:
    """A limit of time passed."""
    return Unreachable(f"{hop.where} did not answer in time", "is the host up, and the address right?", detail=detail)


def refused_connection(hop: Hop) -> Unreachable:
    """Nobody listens."""
    return Unreachable(f"{hop.where} refused the connection", "is sshd running there, and the port right?")


def no_route(hop: Hop, detail: str = "") -> Unreachable:
    """The network."""
    return Unreachable(f"there is no route to {hop.where}", "is the network (VPN?) up?", detail=detail)


def jump_cannot_reach(hop: Hop, said: str) -> Unreachable:
    """The jump host is well."""
    return Unreachable(
        f"the jump host cannot reach {hop.where}: {said}", "check `jump` and `address`, and AllowTcpForwarding there"
    )


def proxy_ended(hop: Hop, said: str) -> Unreachable:
    """The ProxyCommand, not the host."""
    lines = said.strip().splitlines() or ["nothing"]
    return Unreachable(
        f"the ProxyCommand to {hop.where} ended, and said: {visible(lines[-1].strip(), 200)}",
        f"does it work by hand? `{hop.proxy_command}`",
        detail=said,
    )


def failed(hop: Hop, said: str) -> Unreachable:
    """All else."""
    return Unreachable(f"the connection to {hop.where} failed: {said}", "try again", detail=said)


def no_session(label: str, said: str) -> Unanswered:
    """The connection stands and the server opens no channel."""
    return Unanswered(
        f"{label} refused another session (its sshd's limit is MaxSessions): {said}",
        "raise MaxSessions in its sshd_config, or try again",
    )


def unanswered(label: str, seconds: float, detail: str = "") -> Unanswered:
    """The deadline of an exchange passed."""
    return Unanswered(
        f"no answer from {label} within {seconds:g} s",
        "the node or the container may be frozen (a backup?) or very busy: try again",
        detail=detail,
    )


def _or_openssh(hop: Hop) -> str:
    return "" if hop.entry.via == "openssh" else "; if `ssh` itself logs in, set `via: openssh` for the host"


def lost(label: str, detail: str) -> ConnectionLost:
    """It stood, and stands no more."""
    return ConnectionLost(f"the connection to {label} broke", "try again", detail=detail)


def unusable_key(hop: Hop, said: str) -> NotPermitted:
    """A key file that was named holds no key, or one of a kind that is not known."""
    return NotPermitted(
        f"the key file for {hop.where} cannot be used: {said}", f"correct `identity` of the host{_or_openssh(hop)}"
    )
