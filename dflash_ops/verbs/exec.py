"""Runs a command in a run's release, with its interpreter and variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from dflash_ops.errors import Exit, UsageError
from dflash_ops.remote.protocol import ExecRequest
from dflash_ops.run.record import check_run_name
from dflash_ops.transport.base import BadAnswer, Frame, result_of
from dflash_ops.verbs.session import Session


def execute(session: Session, run: str, argv: Sequence[str], out: BinaryIO, err: BinaryIO) -> int:
    """Run `argv` there, passing its outputs on; its exit code. Raises DflashError when it was not run."""
    if not argv:
        raise UsageError("there is no command to run", f"write `dflash exec {run} -- python -V`")
    request: ExecRequest = {"root": session.root, "run": check_run_name(run), "argv": list(argv)}
    session.so_far = "the command, if it had begun, is ended with the connection"

    def pass_on(frame: Frame) -> None:
        match frame.value:
            case {"to": "out" | "err" as name, "data": bytes(data)}:
                sink = out if name == "out" else err
                sink.write(data)
                sink.flush()
            case _:
                raise BadAnswer("the output came in a form that this dflash does not know")

    status = result_of(session.stream("exec", request), pass_on).get("status")
    return status if isinstance(status, int) and 0 <= status <= 255 else Exit.INTERNAL
