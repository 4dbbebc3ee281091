"""Holds the typed form of the facts that `dflash_ops.remote.facts` collects in a container.

Every launch stores these facts with its run; `dflash doctor` judges fresh ones, `dflash diff` compares two runs'.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_ops.errors import ConfigurationError
from dflash_ops.run.probes.gpu import GpuReading, RawGpu, read_gpu


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Unread(_Part):
    """A part that could not be read."""

    error: str


class System(_Part):
    """The container as a machine. `memory` in bytes; `pid1` is the init's name."""

    hostname: str
    os: str | None
    kernel: str
    machine: str
    libc: str
    systemd: int | None
    systemd_build: str | None
    pid1: str | None
    cpus: int
    memory: int | None
    memory_available: int | None
    timezone: str


class Python(_Part):
    """The interpreter that runs the trainer."""

    version: str
    implementation: str
    executable: str
    prefix: str
    path_given: str


class ChangedFile(_Part):
    file: str
    sha256: str


class TorchFiles(_Part):
    """torch's tracing and compiling code against the hashes that its wheel came with."""

    state: str  # intact, changed, unknown
    reason: str = ""
    checked: int
    changed: list[ChangedFile]
    added: list[str]


class Torch(_Part):
    version: str
    cuda: str | None
    git: str | None
    folder: str
    files: TorchFiles


class Hook(_Part):
    """Code that runs whenever the interpreter starts."""

    file: str
    what: str  # sitecustomize.py, usercustomize.py, pth
    sha256: str


class Driver(_Part):
    """NVIDIA's two halves, which must have one version: the kernel's (the node's) and the container's library."""

    kernel: str | None
    library: str | Unread | None


class DiskFacts(_Part):
    path: str
    free: int
    total: int
    inodes_free: int
    inodes_total: int


class CacheKey(_Part):
    bytes: int
    files: int
    newest: float


class Cache(_Part):
    """The compile cache, and its newest keys."""

    path: str
    bytes: int
    files: int
    keys: dict[str, CacheKey]


class Tree(_Part):
    """A release in the container: sha256 of each file below its folder."""

    path: str
    files: dict[str, str]


class Imported(_Part):
    """What torch itself says, imported; `foreign` are tracing functions that are not the ones torch ships."""

    version: str
    cuda: str | None
    cuda_available: bool
    devices: int
    foreign: list[str]


class Facts(_Part):
    """facts.json."""

    time: float
    boot_id: str | Unread
    system: System | Unread
    python: Python | Unread | None = None
    packages: dict[str, str] = Field(default_factory=dict, description="Normalised name to version")
    torch: Torch | Unread | None = None
    hooks: list[Hook] | Unread = Field(default_factory=list)
    driver: Driver
    gpu: RawGpu | None = None
    limits: dict[str, tuple[str, str]] | Unread
    disk: dict[str, DiskFacts] | Unread
    compile_cache: Cache | Unread
    release: Tree | Unread | None = None
    variables: list[str] = Field(default_factory=list, description="Names only")
    manager_variables: list[str] | Unread = Field(default_factory=list, description="Names only")
    imported: Imported | Unread | None = None

    def gpus(self) -> GpuReading | None:
        """The GPUs as a reading; None when they were not asked for."""
        return None if self.gpu is None else read_gpu(self.gpu)


def read_facts(value: dict[str, Any], whose: str) -> Facts:
    """Facts out of a frame. Raises ConfigurationError when they are not in a form that this dflash knows."""
    try:
        return Facts.model_validate(value)
    except ValidationError as error:
        raise ConfigurationError(
            f"the facts of {whose} are in a form that this dflash does not know",
            "they were written by another version, or damaged",
            detail=str(error),
        ) from error
