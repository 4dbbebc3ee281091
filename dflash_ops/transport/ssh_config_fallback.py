"""Reads the ssh configuration where this machine has no ssh client, and refuses what paramiko would pass over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import paramiko

from dflash_ops.transport.base import Misconfigured

HONOURED = frozenset(
    """
    hostname user port identityfile identitiesonly identityagent certificatefile hostkeyalias userknownhostsfile
    globalknownhostsfile proxycommand proxyjump addressfamily bindaddress include
    canonicalizehostname canonicaldomains canonicalizemaxdots canonicalizefallbacklocal
    """.split()  # noqa: SIM905
)
# They change neither the machine that is reached, nor whether its key is believed, nor whether a login succeeds.
HARMLESS = frozenset(
    """
    addkeystoagent batchmode checkhostip ciphers clearallforwardings compression connecttimeout connectionattempts
    controlmaster controlpath controlpersist dynamicforward enablesshkeysign escapechar exitonforwardfailure
    forwardagent forwardx11 forwardx11timeout forwardx11trusted gatewayports gssapiauthentication
    gssapidelegatecredentials hashknownhosts hostbasedauthentication hostkeyalgorithms ignoreunknown ipqos
    kbdinteractiveauthentication kexalgorithms localcommand localforward loglevel logverbose macs
    numberofpasswordprompts passwordauthentication permitlocalcommand preferredauthentications
    pubkeyacceptedalgorithms pubkeyacceptedkeytypes pubkeyauthentication rekeylimit remoteforward requesttty sendenv
    serveralivecountmax serveraliveinterval setenv stricthostkeychecking syslogfacility tcpkeepalive updatehostkeys
    usekeychain visualhostkey xauthlocation
    """.split()  # noqa: SIM905
)
CRITERIA = frozenset(("all", "canonical", "final", "exec", "host", "originalhost", "user", "localuser"))


class _Raw(paramiko.SSHConfig):
    """Leaves the tokens of all other keywords to us: paramiko knows neither `%%` nor `%n`."""

    def _allowed_tokens(self, key: str) -> list[str]:
        return self.TOKENS_BY_CONFIG_KEY[key] if key in ("hostname", "match-exec") else []


def look_up(asked: str, config: Path | None) -> dict[str, list[str]]:
    """Every keyword that applies to a host, in small letters, with its values. Raises Misconfigured."""
    files = [config] if config else [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    parsed = _Raw()
    strange: list[str] = []
    try:
        for path in files:
            if path != config and not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            strange += _strange_lines(text, path)
            parsed.parse(text.splitlines(keepends=True))
        found: dict[str, Any] = dict(parsed.lookup(asked))
    except (paramiko.ConfigParseError, OSError, ValueError, KeyError) as error:
        raise Misconfigured(
            f"the ssh configuration cannot be read: {error}",
            "correct it, or name another by `ssh_config:` of the host",
        ) from error
    strange += sorted(key for key in found if key not in HONOURED | HARMLESS)
    if "%" in str(found.get("userknownhostsfile", "")) + str(found.get("globalknownhostsfile", "")):
        strange.append("% in a UserKnownHostsFile")
    if strange:
        raise Misconfigured(
            f"without an ssh client here, these of the ssh configuration for {asked} are not understood: "
            + ", ".join(dict.fromkeys(strange)),
            "install OpenSSH's client (`ssh`), or name a configuration without them by `ssh_config:` of the host",
        )
    return {
        key: value if isinstance(value, list) else [str(value)] for key, value in found.items() if value is not None
    }


def _strange_lines(text: str, path: Path) -> list[str]:
    """Include lines that lead to a file, and criteria of Match that paramiko takes for true."""
    strange = []
    for line in text.splitlines():
        key, _, rest = re.sub(r"[\s=]+", " ", line.strip(), count=1).partition(" ")
        if key.lower() == "include" and any(_included(word, path) for word in rest.split()):
            strange.append(f"Include {rest.strip()}")
        if key.lower() == "match":
            words = iter(rest.split())
            for word in words:
                criterion = word.lower().removeprefix("!")
                if criterion not in CRITERIA:
                    strange.append(f"Match {criterion}")
                if criterion not in ("all", "canonical", "final"):
                    argument = next(words, "")
                    while argument.count('"') % 2:
                        argument += next(words, '"')
    return strange


def _included(word: str, path: Path) -> bool:
    pattern = Path(word.strip('"')).expanduser()
    base = Path("/etc/ssh") if path == Path("/etc/ssh/ssh_config") else Path("~/.ssh").expanduser()
    return any(Path("/").glob(str(base / pattern).lstrip("/")))
