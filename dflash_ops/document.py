"""Holds what every `--json` answer shares: a schema number, a kind, and moments for people and programs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dflash_ops.text import rfc3339, visible

# What a container wrote, safe to print from the moment that it is read.
Printable = Annotated[str, AfterValidator(visible)]
# Unix seconds that a calendar has (to the year 9999).
Epoch = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]


class Document(BaseModel):
    """A versioned answer. Fields are only ever added within a version; what is not known is null, never 0."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(1, alias="schema")


class Moment(BaseModel):
    """A point in time, by the container's clock."""

    model_config = ConfigDict(frozen=True)

    utc: str = Field(description="RFC 3339")
    epoch: float = Field(description="Unix seconds")


def moment(epoch: float | None) -> Moment | None:
    """A moment out of unix seconds; None stays None."""
    return None if epoch is None else Moment(utc=rfc3339(epoch), epoch=epoch)
