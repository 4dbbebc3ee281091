"""Reads from what `ssh -v` logged why a host was not reached, or why a session ended."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_ops.transport import ssh_errors
from dflash_ops.transport.base import NotPermitted, TransportError
from dflash_ops.transport.ssh_config import Hop

_CLOSED = re.compile(r"(kex_exchange_identification|banner exchange): .*([Cc]losed|reset|Broken pipe)")


def greeted(log: str) -> bool:
    """Whether the server said that it speaks ssh."""
    return "Remote protocol version" in log


def logged_in(log: str) -> bool:
    """Whether the server let us in, now or when a ControlMaster was opened."""
    return "Authenticated to " in log or "master session id" in log


def explain(hops: list[Hop], logs: list[str], said: str = "") -> TransportError:
    """The error of the first hop that was not reached.

    Args:
        hops: the way to the host.
        logs: of the client for each hop.
        said: what came on stderr, which is a ProxyCommand's.
    """
    for hop, log, following in zip(hops, logs, [*hops[1:], None], strict=True):
        if not logged_in(log):
            return ssh_errors.cured(_login_error(hop, log, said), hop)
        denied = re.search(r"channel \d+: open failed: (.*)", log)
        if denied and following is not None:
            return ssh_errors.cured(ssh_errors.jump_cannot_reach(following, denied[1].strip()), following)
    return ssh_errors.cured(ssh_errors.failed(hops[-1], _words(logs[-1])), hops[-1])


def explain_session(hops: list[Hop], logs: list[str], label: str) -> TransportError | None:
    """Why a session on a connection that stands gave ssh's exit code 255; None: the command's own was the same."""
    log = logs[-1]
    if re.search(r"(exec|shell) request failed on channel", log):
        return NotPermitted(
            f"{label} does not let this user run commands",
            "is the key, or the user, confined there (ForceCommand, internal-sftp)?",
        )
    if re.search(r"client_loop: send disconnect|closed by remote host|not responding|(read|write)\w* .*failed: ", log):
        return ssh_errors.lost(label, log)
    if "Entering interactive session" in log or _is_multiplexed(log):
        refused = re.search(r"open failed: (.*)|[Ss]ession open refused by peer", log)
        return ssh_errors.no_session(label, (refused[1] or refused[0]).strip()) if refused else None
    return explain(hops, logs)


def _is_multiplexed(log: str) -> bool:
    return "master session id" in log


def _login_error(hop: Hop, log: str, said: str) -> TransportError:
    if hop.proxy_command is not None and not greeted(log) and _CLOSED.search(log):
        return ssh_errors.proxy_ended(hop, said)
    for kinds in (_host_key_error, _network_error, _key_error):
        error = kinds(hop, log)
        if error is not None:
            return error
    return ssh_errors.failed(hop, _words(log))


def _host_key_error(hop: Hop, log: str) -> TransportError | None:
    shown = re.search(r"Server host key: (\S+) (\S+)", log)
    kind, fingerprint = (shown[1], shown[2]) if shown else ("a key", "")
    where = re.search(r"Offending \S+ key in (.*):\d+", log)
    path = Path(where[1]) if where else None
    if "REVOKED HOST KEY" in log:
        marked = re.search(r"REVOKED HOST KEY.*?in (?:file )?(/\S+)", log, re.DOTALL)
        return ssh_errors.revoked_key(hop, Path(marked[1]) if marked else None)
    if "HOST IDENTIFICATION HAS CHANGED" in log:
        return ssh_errors.changed_key(hop, kind, fingerprint, path)
    if "host key is known for" in log or "Host key verification failed" in log:
        return ssh_errors.unknown_key(hop, kind, fingerprint)
    return None


def _network_error(hop: Hop, log: str) -> TransportError | None:
    if "Could not resolve hostname" in log:
        return ssh_errors.unresolved(hop)
    if not greeted(log) and _CLOSED.search(log):
        return ssh_errors.closed_early(hop, " ".join(re.findall(r"banner line \d+: (.*)", log)).strip())
    if "Connection refused" in log:
        return ssh_errors.refused_connection(hop)
    if re.search(r"No route to host|Network is unreachable|Cannot assign requested address", log):
        return ssh_errors.no_route(hop, _words(log))
    if re.search(r"timed out", log):
        return ssh_errors.silent(hop, _words(log))
    return None


def _key_error(hop: Hop, log: str) -> TransportError | None:
    many = re.search(r"Too many authentication failures", log)
    if many:
        return ssh_errors.too_many_keys(hop, many[0])
    partial = re.search(r"Authenticated using \S+ with partial success", log)
    if partial:
        methods = re.findall(r"Authentications that can continue: (\S+)", log)
        return ssh_errors.second_factor(hop, methods[-1].split(",") if methods else ["?"])
    if "Permission denied" not in log:
        return None
    offered = re.findall(r"Offering public key: (.*?) [A-Z0-9-]+ SHA256:", log)
    broken = re.search(r'Load key "(.*)": (?!incorrect passphrase|Permission)(.*)', log)
    if broken and not offered:
        return ssh_errors.unusable_key(hop, f"{broken[1]}: {broken[2].strip()}")
    if re.search(r"passphrase|Server accepts key", log):
        return ssh_errors.encrypted_key(hop)
    return ssh_errors.refused_keys(hop, [Path(path) for path in offered[:1]])


def _words(log: str) -> str:
    """What ssh said itself, without its diary."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not re.match(r"debug\d: |OpenSSH_", line)]
    return lines[-1] if lines else "ssh ended without a word"
