"""How does one run a command where a run lives? In its release, with its interpreter and its variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from dflash_ops.errors import UsageError
from dflash_ops.run.record import check_run_name
from dflash_ops.transport.base import BadAnswer
from dflash_ops.verbs.session import Session


def execute(session: Session, run: str, argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> int:
    """Run `argv` there, passing its outputs on; its exit code. Raises DflashError when it was not run."""
    if not argv:
        raise UsageError("there is no command to run", f"write `dflash exec {run} -- python -V`")
    request = {"run": check_run_name(run), "argv": list(argv)}
    session.so_far = "the command, if it had begun, is ended with the connection"
    for frame in session.stream("exec", request):
        if frame.kind == "result":
            status = frame.value.get("status")
            return status if isinstance(status, int) and 0 <= status <= 255 else 70
        match frame.value:
            case {"to": "out" | "err" as name, "data": bytes(data)}:
                sink = out if name == "out" else err
                sink.write(data)
                sink.flush()
            case _:
                raise BadAnswer("the output came in a form that this dflash does not know")
    raise AssertionError("a stream ends with a result or an error")
