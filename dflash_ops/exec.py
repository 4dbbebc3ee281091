"""How does one run a command where a run lives? In its release, with its interpreter and its variables."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import BinaryIO

from dflash_ops.errors import UsageError
from dflash_ops.run import check_run_name
from dflash_ops.session import Session
from dflash_ops.transport.base import BadAnswer


def execute(session: Session, run: str, argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> int:
    """Run `argv` there, passing its outputs on; its exit code. Raises DflashError when it was not run."""
    if not argv:
        raise UsageError("there is no command to run", f"write `dflash exec {run} -- python -V`")
    request = {"run": check_run_name(run), "argv": list(argv)}
    for frame in session.stream("execute", request):
        if frame.kind == "result":
            status = frame.value.get("status")
            return status if isinstance(status, int) and 0 <= status <= 255 else 70
        for name, sink in (("out", out), ("err", err)):
            if name in frame.value:
                sink.write(_bytes(frame.value[name]))
                sink.flush()
    raise AssertionError("a stream ends with a result or an error")


def _bytes(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise BadAnswer("the container sent output that cannot be decoded") from error
