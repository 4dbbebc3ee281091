"""Offers keys in OpenSSH's order, the named ones first, and none that the configuration leaves out."""

from __future__ import annotations

import base64
import contextlib
import copy
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob

from dflash_ops.transport import ssh_errors
from dflash_ops.transport.ssh_config import Hop

_MAGIC = b"openssh-key-v1\0"


class Agent(AgentSSH):
    """The agent behind a socket; paramiko's own knows only the one of SSH_AUTH_SOCK."""

    def __init__(self, path: str | None, timeout: float) -> None:
        super().__init__()
        if path is not None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            with contextlib.suppress(OSError, paramiko.SSHException, struct.error):  # as if it held no keys
                connection.connect(path)
                self._connect(connection)  # type: ignore[attr-defined]  # as paramiko.Agent does

    def close(self) -> None:
        """Close its socket."""
        self._close()  # type: ignore[attr-defined]


class Keys:
    """An auth_strategy for paramiko's connect: tries one key after the other."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._encrypted = False
        self._unusable: list[str] = []
        self._offered: list[Path] = []
        self._agent: Agent | None = None

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Raises NotPermitted, or what broke the connection."""
        self._agent = Agent(self._hop.agent, 3 * self._hop.entry.connect_timeout)
        try:
            for key in self._candidates():
                try:
                    left = transport.auth_publickey(self._hop.user, key)
                except paramiko.BadAuthenticationType as error:
                    raise ssh_errors.refused_keys(
                        self._hop, detail=f"it takes only {', '.join(error.allowed_types)}"
                    ) from error
                except paramiko.SSHException:
                    if not transport.is_active():
                        raise
                    continue
                if left:
                    raise ssh_errors.second_factor(self._hop, left)
                return
        finally:
            self._agent.close()
        if self._unusable:
            raise ssh_errors.unusable_key(self._hop, self._unusable[0])
        if self._encrypted:
            raise ssh_errors.encrypted_key(self._hop)
        raise ssh_errors.refused_keys(self._hop, self._offered)

    def _candidates(self) -> Iterator[paramiko.PKey]:
        """Named keys (from the agent, then from disk), the agent's others, those that ssh tries by default."""
        assert self._agent is not None
        held = {key.blob: key for key in self._agent.get_keys()}
        on_disk = []
        for path in dict.fromkeys(self._hop.identities):
            blob = public_blob(path)
            if blob is not None and blob in held:
                yield from self._with_certificates(held.pop(blob), path)
            elif path.is_file():
                on_disk.append(path)
        if not self._hop.identities_are_defaults:
            yield from self._from_disk(on_disk)
        if not self._hop.identities_only:
            yield from held.values()
        if self._hop.identities_are_defaults:
            yield from self._from_disk(on_disk)

    def _from_disk(self, paths: list[Path]) -> Iterator[paramiko.PKey]:
        for path in paths:
            if _is_public(path):
                self._unusable.append(f"{path} is a public key, and no agent holds the private one")
                continue
            try:
                key = _load(path)
            except paramiko.PasswordRequiredException:
                self._encrypted = True
            except (paramiko.SSHException, OSError, ValueError) as error:
                self._unusable.append(f"{path}: {error}")
            else:
                self._offered.append(path)
                yield from self._with_certificates(key, path)

    def _with_certificates(self, key: paramiko.PKey, path: Path) -> Iterator[paramiko.PKey]:
        """The key with each certificate that is for it, then the plain key."""
        beside = path.with_name(path.name.removesuffix(".pub") + "-cert.pub")
        end = (key.blob if isinstance(key, AgentKey) else key.asbytes())[-32:]
        for file in (*self._hop.certificates, beside):
            with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
                if end in PublicBlob.from_file(str(file)).key_blob:
                    signed = AgentKey(key.agent, key.blob) if isinstance(key, AgentKey) else copy.copy(key)
                    signed.load_certificate(str(file))
                    yield signed
        yield key


def public_blob(path: Path) -> bytes | None:
    """The public half of a key file, which needs no passphrase; None: it is not there."""
    for file in (path, path.with_name(path.name + ".pub")):
        try:
            words = file.read_bytes()[: 1 << 20].split()
        except OSError:
            continue
        with contextlib.suppress(ValueError, struct.error):
            if len(words) >= 2 and b"-----BEGIN" not in words[0]:
                return base64.b64decode(words[1], validate=True)
            if words[1:4] == [b"OPENSSH", b"PRIVATE", b"KEY-----"]:
                return _blob_of_private(base64.b64decode(b"".join(words[4:-4])))
    return None


def _blob_of_private(data: bytes) -> bytes:
    """OpenSSH's PROTOCOL.key: magic; cipher, kdf, its options; a count; the public key, in clear."""
    if not data.startswith(_MAGIC):
        raise ValueError("no OpenSSH private key")
    at = len(_MAGIC)
    for _ in range(3):
        at += 4 + struct.unpack_from(">I", data, at)[0]
    size = struct.unpack_from(">I", data, at + 4)[0]
    return data[at + 8 : at + 8 + size]


def _is_public(path: Path) -> bool:
    try:
        return path.read_bytes()[:4096].startswith((b"ssh-", b"ecdsa-", b"sk-"))
    except OSError:
        return False


def _load(path: Path) -> paramiko.PKey:
    """Raises SSHException."""
    last: Exception = paramiko.SSHException("not a key that is known here")
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path))
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError) as error:
            last = error
    raise last
