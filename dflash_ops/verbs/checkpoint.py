"""Asks the trainer to save, and returns when the checkpoint is whole."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from dflash_ops.document import Document
from dflash_ops.errors import Exit
from dflash_ops.remote.protocol import CheckpointRequest
from dflash_ops.run.probes.snapshot import Checkpoint
from dflash_ops.run.record import RunName, check_run_name
from dflash_ops.text import visible
from dflash_ops.transport.base import BadAnswer, RemoteRefusal
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import look


class Saved(Document):
    """The answer of `dflash checkpoint`."""

    kind: Literal["checkpoint"] = "checkpoint"
    run: RunName
    checkpoint: Checkpoint
    seconds: float = Field(description="From the request to the manifest, which is written last")


def checkpoint(session: Session, run: str | None, timeout: float) -> Saved:
    """Ask the trainer of a run to save, and wait. Raises RemoteRefusal when it cannot, or does not in time."""
    if run is not None:
        check_run_name(run)
    answer: dict[str, Any] = {}
    try:
        request: CheckpointRequest = {"root": session.root, "run": run, "timeout": timeout}
        for frame in session.stream("checkpoint", request):
            if frame.kind == "event":
                asked = visible(str(frame.value.get("run")), 80)
                session.say(f"asked {asked} to save")
                session.so_far = f"{asked} was asked to save and does so; `dflash status {asked}` shows what it saved"
            answer = frame.value
    except RemoteRefusal as refusal:
        if refusal.reason == "not-running":
            raise _as_it_stands(session, run, refusal) from refusal
        raise
    try:
        return Saved.model_validate(answer)
    except ValidationError as error:
        raise BadAnswer("the checkpoint was announced in a form that this dflash does not know") from error


def _as_it_stands(session: Session, run: str | None, refusal: RemoteRefusal) -> RemoteRefusal:
    """The refusal with the run's own exit code and reason: only its records tell how it ended."""
    verdict = look(session, run).verdict
    # One that ended well has nothing more to save; one that is about to run is asked again later.
    code = {Exit.OK: Exit.USAGE, Exit.RUN_NOT_FINISHED: Exit.TEMPORARY}.get(verdict.exit_code, verdict.exit_code)
    how = verdict.state + (f", {verdict.reason}" if verdict.reason else "")
    return RemoteRefusal(code, f"{refusal.message}: {how}", refusal.hint, reason=refusal.reason)
