"""Defines expected failures: one sentence for the user, its cure, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `dflash`; 100 and up speak of the run, the rest of the command."""

    OK = 0
    USAGE = 2
    UNREACHABLE = 69
    INTERNAL = 70  # a fault of dflash itself
    TEMPORARY = 75
    PERMISSION = 77
    CONFIGURATION = 78
    RUN_FAILED = 100
    RUN_NOT_FINISHED = 101
    RUN_NOT_FOUND = 102
    RUN_CANCELLED = 103
    RUN_LOST = 104
    INTERRUPTED = 130


class DflashError(Exception):
    """An expected failure.

    `message` is one sentence, `hint` the cure, `lines` the end of a log that belongs to it, `detail` for --debug only.
    """

    def __init__(self, code: int, message: str, hint: str = "", *, detail: str = "", lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = Exit(code) if code in set(Exit) else Exit.INTERNAL
        self.message = message
        self.hint = hint
        self.detail = detail
        self.lines = tuple(lines)


class UsageError(DflashError):
    """The command line asks for something that cannot be."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(Exit.USAGE, message, hint)


class ConfigurationError(DflashError):
    """inventory.yaml, the node or the container must be changed first."""

    def __init__(self, message: str, hint: str = "", *, detail: str = "") -> None:
        super().__init__(Exit.CONFIGURATION, message, hint, detail=detail)
