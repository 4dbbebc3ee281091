"""Reads known_hosts files as OpenSSH does: hashed names, patterns, `[name]:port`, revoked keys."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A host key that no known_hosts file holds."""

    host: str  # as known_hosts writes it: name, or [name]:port
    kind: str
    base64: str
    known_hosts: Path  # where it would be written

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` shows it."""
        digest = hashlib.sha256(base64.b64decode(self.base64)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Line:
    """One key of a file, and the hosts that it is for."""

    path: Path
    marker: str  # "", "@revoked" or "@cert-authority"
    hosts: str
    kind: str
    base64: str

    def is_for(self, name: str) -> bool:
        """Whether the line names the host, by its hash, its name or a pattern."""
        if self.hosts.startswith("|1|"):
            return _hash_fits(self.hosts, name)
        fits = False
        for pattern in self.hosts.lower().split(","):
            if _pattern_fits(pattern.removeprefix("!"), name.lower()):
                if pattern.startswith("!"):
                    return False
                fits = True
        return fits


Judgement = Literal["known", "unknown", "changed", "revoked"]


def read(files: Iterable[Path]) -> Iterator[Line]:
    """Every line that holds a key. A damaged line is passed over: its host is unknown, no more."""
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) >= 3 and not words[0].startswith("#"):
                yield Line(path, marker, *words[:3])


def judge(lines: list[Line], name: str, bare: str | None, kind: str, key: str) -> tuple[Judgement, Path | None]:
    """What the files say of the key that a host shows, and the file that says it.

    Args:
        lines: of all the files, in order.
        name: as known_hosts writes it, `[name]:port` unless the port is 22.
        bare: the name without its port, for which OpenSSH also takes a key that fits; None: do not.
        kind: such as ssh-ed25519.
        key: base64.
    """
    names = [name] if bare is None or bare == name else [name, bare]
    for line in lines:
        if line.marker == "@revoked" and line.base64 == key and any(map(line.is_for, names)):
            return "revoked", line.path
    plain = [line for line in lines if not line.marker]
    for line in plain:
        if line.base64 == key and any(map(line.is_for, names)):
            return "known", line.path
    for line in plain:
        if line.kind == kind and line.is_for(name):
            return "changed", line.path
    return "unknown", None


def kinds(lines: list[Line], name: str, bare: str | None) -> list[str]:
    """The kinds of key that are known of a host, in the order of the files."""
    names = [name] if bare is None else [name, bare]
    return [line.kind for line in lines if not line.marker and any(map(line.is_for, names))]


def append(key: UnknownKey) -> None:
    """Write an accepted key down."""
    key.known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with key.known_hosts.open("a+b") as stream:
        stream.seek(0, 2)
        if stream.tell():
            stream.seek(-1, 2)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(f"{key.host} {key.kind} {key.base64}\n".encode())


def _hash_fits(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in hashed[3:].split("|"))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.lower().encode(), hashlib.sha1).digest(), digest)


def _pattern_fits(pattern: str, name: str) -> bool:
    if "*" not in pattern and "?" not in pattern:
        return pattern == name
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None
