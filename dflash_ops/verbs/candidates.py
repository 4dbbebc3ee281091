"""Describes the containers that `dflash init` chooses from, in the words that are shown and written as comments."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document, Printable
from dflash_ops.run.probes.gpu import GpuDevices, GpuNone, GpuUnknown, RawGpu, read_gpu
from dflash_ops.text import counted, size
from dflash_ops.verbs.doctor import Diagnosis

_OLDEST = (3, 11)  # the trainer's


class PythonFound(BaseModel):
    """An interpreter in a container."""

    path: Printable = Field(max_length=500)
    version: Printable = Field(max_length=40)
    torch: Printable | None = Field(max_length=80)
    cuda: Printable | None = Field(max_length=40)

    def about(self) -> str:
        """`3.11.7, torch 2.13.0 (CUDA 12.8)`."""
        torch = f"torch {self.torch}" + (f" (CUDA {self.cuda})" if self.cuda else "") if self.torch else "no torch"
        return f"{self.version}, {torch}" if self.version else "not looked at"

    @property
    def fits(self) -> bool:
        """Whether the trainer could run on it."""
        parts = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        return self.torch is not None and parts >= _OLDEST


class Row(BaseModel):
    """A container as the node lists it."""

    vmid: int = Field(ge=100, le=999_999_999)
    status: Printable = Field(max_length=40)
    lock: Printable = Field(max_length=40)
    name: Printable = Field(max_length=80)
    config: dict[str, Printable] | None


class NodeList(BaseModel):
    """What `dflash_ops.remote.init` finds on the host."""

    user: int
    pct: bool
    error: Printable
    containers: list[Row]


class Inside(BaseModel):
    """What `dflash_ops.remote.init` finds in a container."""

    gpu: RawGpu = Field(exclude=True)
    pythons: list[PythonFound]
    free: int
    cpus: int

    def gpus(self) -> str:
        """`8 × NVIDIA H200`, `no GPU`, or why that is not known."""
        match read_gpu(self.gpu):
            case GpuDevices(devices=devices):
                return f"{len(devices)} × {', '.join(sorted({device.name for device in devices}))}"
            case GpuNone():
                return "no GPU"
            case GpuUnknown(reason=reason):
                return f"GPUs unknown: {reason}"


class Candidate(BaseModel):
    """One container of the host; `inside` where it could be entered, else `error`."""

    vmid: int
    name: str
    status: str
    gpus_given: int | None = Field(description="GPUs that its configuration names; null: it may not be read")
    gpus: Printable | None = Field(description="What nvidia-smi in it says; null: it was not entered")
    inside: Inside | None
    error: Printable

    def about(self) -> str:
        """`running, 8 × NVIDIA H200`."""
        if self.inside is not None:
            return f"{self.gpus}, {counted(self.inside.cpus, 'CPU')}"
        given = f", {counted(self.gpus_given, 'GPU')} in its configuration" if self.gpus_given else ""
        return f"{self.error}{given}"

    def room(self) -> str:
        """`812 GiB free`."""
        return f"{size(self.inside.free)} free" if self.inside is not None else "not looked at"

    def fitting(self) -> list[PythonFound]:
        """Interpreters that the trainer could run on."""
        return [each for each in self.inside.pythons if each.fits] if self.inside is not None else []


class Initialized(Document):
    """The answer of `dflash init`."""

    kind: Literal["init"] = "init"
    host: str
    inventory: str = Field(description="The file that was written")
    added: tuple[str, ...] = Field(description="Entries, as `containers.train`; those that were there are not named")
    containers: tuple[str, ...] = Field(description="Names of the chosen containers in the inventory")
    found: tuple[Candidate, ...] = Field(description="The containers that were looked at")
    doctor: tuple[Diagnosis, ...] = Field(description="One for each chosen container")


def candidate(row: Row, inside: Inside | None, error: str) -> Candidate:
    """Both views of a container together."""
    given: int | None = None
    if row.config is not None:
        text = " ".join(value for key, value in row.config.items() if key.startswith(("dev", "lxc.mount")))
        given = len(set(re.findall(r"/?dev/nvidia(\d+)\b", text)))
    return Candidate(
        vmid=row.vmid,
        name=row.name,
        status=row.status,
        gpus_given=given,
        gpus=inside.gpus() if inside is not None else None,
        inside=inside,
        error=error,
    )
