"""Describes, reads and explains a run's configuration; imports no torch."""

from trainer.config.sections import RunConfig

__all__ = ["RunConfig"]
