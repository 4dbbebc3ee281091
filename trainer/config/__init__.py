"""Describes, reads and explains a run's configuration; imports no torch."""

from trainer.config.sections import RENAMED_KEYS, RunConfig

__all__ = ["RENAMED_KEYS", "RunConfig"]
