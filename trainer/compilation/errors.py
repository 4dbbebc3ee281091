"""Names the two ways in which compilation fails a run."""

from __future__ import annotations


class CompilationError(RuntimeError):
    """The step could not be compiled as the run demands; raised before the first optimizer step."""


class LateCompilationError(RuntimeError):
    """Something was compiled after the compilation phase."""
