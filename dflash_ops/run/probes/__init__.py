"""Turns raw answers about the unit, the log and the GPUs into typed readings.

A probe is two things: a question that `dflash_ops.remote.status` asks in the container, and a pure function here that
turns the raw answer into a typed reading. Every reading has `answer`: yes, no, unknown (with a reason), and for the
GPUs also none. A reading never decides about the run; `dflash_ops.run.verdict` does.
"""

from pydantic import BaseModel, ConfigDict


class Reading(BaseModel):
    """What a probe found out."""

    model_config = ConfigDict(frozen=True)
