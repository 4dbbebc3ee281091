"""How does one get a checkpoint now? The trainer is asked, and the answer comes when the checkpoint is whole."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from dflash_ops.document import Document
from dflash_ops.probes.snapshot import Checkpoint
from dflash_ops.run import RunName, check_run_name
from dflash_ops.session import Session
from dflash_ops.text import visible
from dflash_ops.transport.base import BadAnswer


class Saved(Document):
    """The answer of `dflash checkpoint`."""

    kind: Literal["saved"] = "saved"
    run: RunName
    checkpoint: Checkpoint
    seconds: float = Field(description="From the request to the manifest, which is written last")


def checkpoint(session: Session, run: str | None, timeout: float) -> Saved:
    """Ask the trainer of a run to save, and wait. Raises RemoteRefusal when it cannot, or does not in time."""
    if run is not None:
        check_run_name(run)
    answer: dict[str, Any] = {}
    for frame in session.stream("checkpoint", {"run": run, "timeout": timeout}):
        if frame.kind == "event":
            asked = visible(str(frame.value.get("run")), 80)
            session.say(f"asked {asked} to save")
            session.so_far = f"{asked} was asked to save and does so; `dflash status {asked}` shows what it saved"
        answer = frame.value
    try:
        return Saved.model_validate(answer)
    except ValidationError as error:
        raise BadAnswer("the checkpoint was announced in a form that this dflash does not know") from error
