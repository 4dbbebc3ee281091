"""Explains what a node said in place of running the command: the container was not reached."""

from __future__ import annotations

import re

from dflash_ops.errors import DflashError
from dflash_ops.text import visible
from dflash_ops.transport.base import ConnectionLost, NotPermitted

MAX_WORDS = 300
# Said besides, whatever the cause.
_BESIDES = re.compile(r"perl: warning|^\s+(LANG\w*|LC_\w+) = |are supported and installed|^Last login|setlocale")
_KNOWN = (
    (
        r"account is (currently )?not available|nologin",
        "gives its user no shell",
        "set one there (`usermod -s /bin/bash USER`), or log in as another user by `user` of the host",
    ),
    (
        r"restricted: cannot|: restricted$|restricted shell",
        "confines its user to a restricted shell",
        "set an ordinary one there (`usermod -s /bin/bash USER`), or log in as another user by `user` of the host",
    ),
    (
        r"must have a tty to run sudo",
        "lets sudo run only on a terminal",
        "add `Defaults:USER !requiretty` to its sudoers by `visudo`",
    ),
)


def explain(text: str, status: int | None, host: str) -> DflashError | None:
    """The error for `text` when no program began; None when nothing was said."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _BESIDES.search(line)]
    if not lines:
        return None
    for pattern, what, cure in _KNOWN:
        said = next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), None)
        if said is not None:
            return NotPermitted(
                f"{host} {what}, so the container was not reached; it said: {visible(said, MAX_WORDS)}", cure
            )
    return ConnectionLost(
        f"{host} did not run the command, so the container was not reached; "
        f"it gave exit code {status} and said: {visible(' / '.join(lines[-3:]), MAX_WORDS)}",
        "is a command forced on this key or user there (ForceCommand, or command= in authorized_keys)? else try again",
        detail=text.strip(),
    )
