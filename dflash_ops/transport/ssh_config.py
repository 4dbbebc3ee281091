"""Resolves a host and the jump hosts before it as the ssh client would, by asking the client itself (`ssh -G`).

Without an `ssh` client on this machine paramiko's parser reads the configuration; what is present and it does not
understand is an error, since it would pass over it without a word.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dflash_ops.inventory.models import HostEntry, Inventory
from dflash_ops.transport.base import Misconfigured

RESOLVE_TIMEOUT = 15  # seconds; `Match exec` runs commands of the user's
MAX_HOPS = 8
DEFAULT_KEYS = re.compile(r"~/\.ssh/id_\w+")  # what ssh tries when no IdentityFile is set
# Their absence would change which machine is reached, or whether its key is believed.
ONLY_OPENSSH = ("proxyusefdpass", "knownhostscommand", "revokedhostkeys", "bindinterface")
Found = dict[str, list[str]]  # keyword in small letters: its values


@dataclass(frozen=True, slots=True)
class Hop:
    """One machine on the way, with all that ssh knows of it."""

    name: str  # the host of the inventory that the user can correct
    entry: HostEntry
    asked: str  # the name that was looked up
    user: str
    host: str
    port: int
    alias: str | None  # HostKeyAlias
    identities: tuple[Path, ...]  # in the order in which they are tried
    identities_are_defaults: bool
    identities_only: bool
    certificates: tuple[Path, ...]
    agent: str | None  # its socket
    known_hosts: tuple[Path, ...]  # the first is written to
    global_known_hosts: tuple[Path, ...]
    proxy_command: str | None
    jumps: tuple[str, ...]
    control_path: str | None
    family: socket.AddressFamily
    bind: str | None
    only_openssh: tuple[str, ...]  # keywords that are set and that only the ssh client follows

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.name} ({self.host}:{self.port})"

    @property
    def known_as(self) -> str:
        """The host's name in known_hosts."""
        if self.alias is not None:
            return self.alias
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def bare(self) -> str | None:
        """The name without port, which OpenSSH looks for next."""
        return None if self.alias is not None else self.host

    @property
    def known_files(self) -> tuple[Path, ...]:
        """All files that may hold its key."""
        return (*self.known_hosts, *self.global_known_hosts)


def way(name: str, inventory: Inventory) -> list[Hop]:
    """The jump hosts in order and the host of the inventory last. Raises Misconfigured."""
    return _way(name, inventory.hosts[name], inventory, 0)


def _way(name: str, entry: HostEntry, inventory: Inventory, behind: int) -> list[Hop]:
    """As OpenSSH does it: the first jump host is reached by its own jumps, the others from the one before."""
    last = resolve(name, entry, inventory)
    if behind > MAX_HOPS:
        raise Misconfigured(
            f"there are more than {MAX_HOPS} jump hosts on the way to {name}: they lead in a circle by {last.where}",
            "correct `jump` of the host, or ProxyJump of the ssh configuration",
        )
    if entry.jump:
        entries = [_inventory_jump(jump, name, entry, inventory) for jump in entry.jump]
    else:
        entries = [(name, _jump_entry(jump, name, entry)) for jump in last.jumps]
    hops = [hop for jump in entries[:1] for hop in _way(*jump, inventory, behind + 1)]
    hops += [resolve(*jump, inventory) for jump in entries[1:]]
    return [*hops, last]


def _inventory_jump(jump: str, name: str, entry: HostEntry, inventory: Inventory) -> tuple[str, HostEntry]:
    if jump in inventory.hosts:
        return jump, inventory.hosts[jump]
    return name, _jump_entry(jump, name, entry)


_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<six>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%\w+)?)|"
    r"(?P<plain>[^:\[\]/@]+))(?::(?P<port>\d+))?/?"
)


def _jump_entry(jump: str, name: str, entry: HostEntry) -> HostEntry:
    """user@address:port, ssh://user@address:port or an IPv6 address, the latter in brackets if a port follows."""
    found = _JUMP.fullmatch(jump)
    if found is None:
        raise Misconfigured(
            f"{jump!r} is neither a host of the inventory nor user@address:port",
            f"correct `jump` of host {name}, or ProxyJump of the ssh configuration",
        )
    try:
        return HostEntry.model_validate(
            {
                "address": found["bracketed"] or found["six"] or found["plain"],
                "user": found["user"],
                "port": int(found["port"]) if found["port"] else None,
                "known_hosts": entry.known_hosts,
                "ssh_config": entry.ssh_config,
                "connect_timeout": entry.connect_timeout,
                "via": entry.via,
            }
        )
    except ValidationError as error:
        raise Misconfigured(
            f"the jump host {jump!r}: {error.errors()[0]['msg']}",
            f"correct `jump` of host {name}, or ProxyJump of the ssh configuration",
        ) from error


def resolve(name: str, entry: HostEntry, inventory: Inventory) -> Hop:
    """What ssh knows of one machine; what the inventory says goes first. Raises Misconfigured."""
    asked = entry.address.removeprefix("[").removesuffix("]")
    client = shutil.which("ssh")
    if client is not None:
        found = _ask_client(client, asked, client_arguments(entry, inventory))
    else:
        from dflash_ops.transport.ssh_config_fallback import look_up

        found = look_up(asked, inventory.resolve(entry.ssh_config) if entry.ssh_config else None)
    return _hop(name, entry, inventory, asked, found)


def client_arguments(entry: HostEntry, inventory: Inventory) -> list[str]:
    """The ssh client's options that select the configuration, user and port."""
    words = ["-F", str(inventory.resolve(entry.ssh_config))] if entry.ssh_config else []
    words += ["-l", entry.user] if entry.user else []
    words += ["-p", str(entry.port)] if entry.port else []
    return words


def _ask_client(client: str, asked: str, arguments: list[str]) -> Found:
    try:
        answer = subprocess.run(
            [client, "-T", "-G", *arguments, "--", asked],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=RESOLVE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Misconfigured(f"`ssh -G {asked}` did not answer: {error}", "does `Match exec` hang?") from error
    if answer.returncode:
        said = [line for line in answer.stderr.decode("utf-8", "backslashreplace").splitlines() if line.strip()]
        raise Misconfigured(
            f"the ssh configuration cannot be read: {said[0].strip() if said else 'ssh -G failed'}",
            "correct it, or name another by `ssh_config:` of the host",
            detail="\n".join(said),
        )
    found: Found = {}
    for line in answer.stdout.decode("utf-8", "surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value.strip())
    return found


def _hop(name: str, entry: HostEntry, inventory: Inventory, asked: str, found: Found) -> Hop:
    def first(key: str) -> str | None:
        value = found.get(key, [""])[0]
        return None if value.lower() in ("", "none") else value

    user = entry.user or first("user") or getpass.getuser()
    host = first("hostname") or asked
    port = entry.port or int(first("port") or 22)
    alias = first("hostkeyalias")
    tokens = {"%": "%", "h": host, "n": asked, "p": str(port), "r": user, "k": alias or asked}
    named = [value for value in found.get("identityfile", []) if value.lower() != "none"]
    defaults = all(DEFAULT_KEYS.fullmatch(value) for value in named)
    identities = [_path(value, tokens) for value in named]
    if entry.identity is not None:
        identity = inventory.resolve(entry.identity)
        if not identity.is_file():
            # A host that a command raises has no key while it is down.
            raise Misconfigured(
                f"the key file {identity} of host {name} does not exist",
                entry.cure
                or f"correct `identity` of host {name}, or create one with `ssh-keygen -t ed25519 -f {identity}`",
            )
        identities = [identity] if defaults else [identity, *identities]
    if entry.known_hosts is not None:
        known: tuple[Path, ...] = (inventory.resolve(entry.known_hosts),)
    else:
        known = _files(first("userknownhostsfile") or "~/.ssh/known_hosts")
    proxy = first("proxycommand")
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return Hop(
        name=name,
        entry=entry,
        asked=asked,
        user=user,
        host=host,
        port=port,
        alias=alias,
        identities=tuple(identities),
        identities_are_defaults=defaults and entry.identity is None,
        identities_only=entry.identity is not None or first("identitiesonly") in ("yes", "true"),
        certificates=tuple(_path(value, tokens) for value in found.get("certificatefile", []) if value != "none"),
        agent=_agent(found.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        known_hosts=known,
        global_known_hosts=_files(first("globalknownhostsfile") or "/etc/ssh/ssh_known_hosts"),
        proxy_command=_expanded(proxy, tokens) if proxy else None,
        jumps=tuple(part.strip() for part in (first("proxyjump") or "").split(",") if part.strip()),
        control_path=first("controlpath"),
        family=families.get(first("addressfamily") or "any", socket.AF_UNSPEC),
        bind=first("bindaddress"),
        only_openssh=tuple(key for key in ONLY_OPENSSH if (first(key) or "no") not in ("no", "false")),
    )


def _expanded(text: str, tokens: dict[str, str]) -> str:
    """The tokens of ssh_config(5). The client prints IdentityFile, CertificateFile and ProxyCommand without them."""

    def value(token: re.Match[str]) -> str:
        if token[1] in tokens:
            return tokens[token[1]]
        own: dict[str, Callable[[], str]] = {
            "d": lambda: str(Path.home()),
            "u": getpass.getuser,
            "i": lambda: str(os.getuid()),
            "l": socket.gethostname,
            "L": lambda: socket.gethostname().partition(".")[0],
        }
        if token[1] not in own:
            raise Misconfigured(
                f"{token[0]} in `{text}` of the ssh configuration is not understood",
                "write it out, or set `via: openssh` for the host",
            )
        return own[token[1]]()

    return re.sub(r"%(.?)", value, text)


def _path(text: str, tokens: dict[str, str]) -> Path:
    named = re.sub(r"\$\{(\w+)\}", lambda variable: os.environ.get(variable[1], ""), _expanded(text, tokens))
    return Path(named).expanduser()


def _files(text: str) -> tuple[Path, ...]:
    """The client prints these with their tokens replaced: what looks like one now is a part of a name."""
    return tuple(Path(part).expanduser() for part in text.replace('"', "").split())


def _agent(text: str, tokens: dict[str, str]) -> str | None:
    if text.lower() == "none":
        return None
    if text == "SSH_AUTH_SOCK" or not text:
        return os.environ.get("SSH_AUTH_SOCK")
    if text.startswith("$") and not text.startswith("${"):
        return os.environ.get(text[1:])
    return str(_path(text, tokens))
