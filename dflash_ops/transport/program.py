"""Builds what is sent into the container: a constant command line; everything else travels on stdin.

stdin is one header line `<sha256> <program bytes> <all bytes>`, the compressed program, the request, the payload.
The one-liner runs nothing unless all announced bytes came and their hash is right, so a cut program never runs.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources

from dflash_ops.transport.base import Program

# No quotes of either kind, no backslash, `!` or newline: it stands in double quotes inside single quotes, and the
# login shell of the host may be any. -I and -S: whatever the container's user put on Python's path stays out.
_READER = (
    "import sys,hashlib,zlib;b=sys.stdin.buffer;h,p,n=b.readline().split();s=b.read(int(n));"
    "hashlib.sha256(s).hexdigest().encode()==h and exec(zlib.decompress(s[:int(p)]),dict(request=s[int(p):]))"
)
BOOTSTRAP = (
    "/bin/sh -c 'for p in python3 /usr/bin/python3 /usr/local/bin/python3; do "
    f'command -v $p >/dev/null 2>&1 && exec $p -I -S -u -c "{_READER}"; '
    "done; echo @@DFLASH no-python3'"
)


@cache
def _bundle() -> bytes:
    """All of `dflash_ops.remote`, as one compressed Python text."""
    folder = resources.files("dflash_ops.remote")
    sources = {"dflash_ops": "", "dflash_ops.remote": ""}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".py") and entry.name not in ("__init__.py", "bootstrap.py"):
            sources[f"dflash_ops.remote.{entry.name[:-3]}"] = entry.read_text(encoding="utf-8")
    start = (folder / "bootstrap.py").read_text(encoding="utf-8")
    return zlib.compress(f"{start}\nstart({sources!r}, request)\n".encode(), 1)


def encode(
    program: Program, request: Mapping[str, object], limit: float, payload: Iterable[bytes] | None = None
) -> Iterator[bytes]:
    """The bytes for stdin. `limit`: seconds after which the program ends itself."""
    body = json.dumps({"verb": program.verb, "limit": max(1, int(limit)), "request": request}).encode()
    source = _bundle()
    digest = hashlib.sha256(source + body).hexdigest()
    yield f"{digest} {len(source)} {len(source) + len(body)}\n".encode() + source + body
    if payload is not None:
        yield from payload
