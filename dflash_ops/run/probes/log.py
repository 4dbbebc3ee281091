"""Reads whether the log grows, and what its end says went wrong.

Ages are by the container's clock, read in the same probe: the laptop's clock may be anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_ops.remote.lines import last_segment
from dflash_ops.run.probes import Reading
from dflash_ops.text import visible


class RawFile(BaseModel):
    """The log as the remote program found it."""

    kind: Literal["file"] = "file"
    size: int
    inode: int
    mtime: float
    lines: list[str]


class RawMissing(BaseModel):
    kind: Literal["missing"] = "missing"


class RawError(BaseModel):
    kind: Literal["error"] = "error"
    message: str


RawLog = Annotated[RawFile | RawMissing | RawError, Field(discriminator="kind")]


class Disk(BaseModel):
    """Room on the disk that holds the run."""

    model_config = ConfigDict(frozen=True)

    free: int = Field(description="Bytes")
    total: int = Field(description="Bytes")
    inodes_free: int
    inodes_total: int

    @property
    def full(self) -> bool:
        """Whether a log line or a small file may no longer fit. File systems without inode counts say 0 of 0."""
        return self.free < 1 << 20 or (self.inodes_total > 0 and self.inodes_free == 0)


class _Present(Reading):
    size: int = Field(description="Bytes")
    inode: int
    age: float = Field(description="Seconds since the last byte, by the container's clock")
    lines: tuple[str, ...] = Field((), description="Last lines, safe to print")


class LogFresh(_Present):
    """Something was written lately."""

    kind: Literal["fresh"] = "fresh"
    answer: Literal["yes"] = "yes"


class LogSilent(_Present):
    """Nothing was written for longer than a run of this pace needs."""

    kind: Literal["silent"] = "silent"
    answer: Literal["no"] = "no"


class LogGone(Reading):
    """There is no log file: nothing was written yet, or somebody deleted it."""

    kind: Literal["gone"] = "gone"
    answer: Literal["no"] = "no"


class LogUnknown(Reading):
    kind: Literal["unknown"] = "unknown"
    reason: str
    answer: Literal["unknown"] = "unknown"


LogReading = Annotated[LogFresh | LogSilent | LogGone | LogUnknown, Field(discriminator="kind")]


def read_log(raw: RawLog, now: float, quiet_after: float, lifetime: float | None = None) -> LogReading:
    """The log's raw facts as a reading.

    Args:
        now: unix seconds by the container's clock, read in the same probe.
        quiet_after: seconds of silence that are normal for this run.
        lifetime: seconds since the main process started, by the monotonic clock, while it lives. A log that seems
            older than its process betrays a wall clock that jumped.
    """
    match raw:
        case RawMissing():
            return LogGone()
        case RawError(message=message):
            return LogUnknown(reason=f"the log cannot be read: {visible(message, 200)}")
        case RawFile():
            age = now - raw.mtime
            if age < -60 or (lifetime is not None and raw.size and age > lifetime + 60):
                return LogUnknown(reason="the container's clock jumped, so the log's age is not known")
            kind = LogFresh if age <= quiet_after else LogSilent
            lines = tuple(visible(last_segment(line), 500) for line in raw.lines)
            return kind(size=raw.size, inode=raw.inode, age=max(0.0, age), lines=lines)


class Failure(BaseModel):
    """A failure that has a name, and the line that shows it."""

    model_config = ConfigDict(frozen=True)

    name: str
    line: str


# What is searched for are error messages, not words: a log may well say that NCCL started.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "FX tracing error",
            r"Detected that you are using FX to (?:symbolically )?trace|symbolically trace a dynamo-optimized function",
        ),
        (
            "CUDA out of memory",
            r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory"
            r"|CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (
            "NCCL error",
            r"NCCL error|nccl(?:UnhandledCuda|Internal|System|Remote)Error|Watchdog caught collective operation timeout"
            r"|NCCL communicator was aborted",
        ),
        (
            "shared memory full",
            r"insufficient shared memory|unable to (?:open|write to) .*shared memory|/dev/shm.*No space",
        ),
        ("disk full", r"No space left on device|\[Errno 28\]|Disk quota exceeded"),
        ("import error", r"^(?:\w+\.)*(?:ModuleNotFoundError|ImportError): |error while loading shared libraries"),
        (
            "GPU fault",
            r"CUDA error: (?:an illegal memory access|device-side assert|uncorrectable ECC|unspecified launch"
            r"|misaligned address|the launch timed out)|GPU is lost|has fallen off the bus",
        ),
        (
            "GPU driver mismatch",
            r"CUDA driver version is insufficient|forward compatibility was attempted|no kernel image is available"
            r"|[Dd]river/library version mismatch|The NVIDIA driver on your system is too old",
        ),
        (
            "no GPU",
            r"No CUDA GPUs are available|Found no NVIDIA driver|Torch not compiled with CUDA|no CUDA-capable device"
            r"|CUDA unknown error",
        ),
        (
            "out of host memory",
            r"DefaultCPUAllocator: |^(?:\w+\.)*MemoryError\b|Cannot allocate memory|killed by signal: Killed",
        ),
        ("too many open files", r"Too many open files|received 0 items of ancdata"),
        ("recompile limit", r"hit config\.(?:recompile_limit|cache_size_limit)|FailOnRecompileLimitHit"),
        ("loss is not a number", r"\bloss (?:is|became|was) (?:nan|inf|NaN|not finite|not a number)|non-finite loss"),
    )
)
# A line of the trainer's log: time, level, thread, message.
_RECORD = re.compile(r"\S+Z (?:ERROR|CRITICAL) \S+ (?P<message>.+)")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure|Exit)\b(?:: .*)?$")


def named_failure(lines: Sequence[str]) -> Failure | None:
    """The first failure of the log's end that has a name: what follows it is usually its consequence."""
    for line in lines:
        for name, pattern in _PATTERNS:
            if pattern.search(line):
                return Failure(name=name, line=line.strip())
    return None


def last_error(lines: Sequence[str]) -> str | None:
    """What the last line says that is an exception's own (`ValueError: …`) or is marked ERROR; None without one."""
    for line in reversed(lines):
        text = line.strip()
        record = _RECORD.match(text)
        if record:
            return record["message"]
        if _EXCEPTION.match(text):
            return text
    return None
