"""Keeps a run directory to one process at a time, and to the checkpoints of one run."""

from __future__ import annotations

import errno
import fcntl
import logging
import uuid
from pathlib import Path

from trainer.run.checkpoint import CheckpointError, WholeCheckpoint

logger = logging.getLogger(__name__)

LOCK = "run.lock"


class RunDirectoryError(Exception):
    """The run directory is another's; the message is one sentence with the cure."""


class RunDirectory:
    """A locked run directory. The kernel lets the lock go when the process ends, however it ends.

    The lock's file holds the run's identity, which its checkpoints repeat.
    """

    def __init__(self, path: Path) -> None:
        """Lock a directory that exists.

        Raises:
            RunDirectoryError: another process trains there.
        """
        self.path = path
        self._file = (path / LOCK).open("a+")
        try:
            # Not flock, whose lock a child that outlives the trainer would go on holding.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise RunDirectoryError(
                    f"another process trains in {path}: wait for its end, or take another run directory"
                ) from None
            logger.warning("%s can't be locked (%s): start no second run there", path, error.strerror)
        self._file.seek(0)
        self._identity = self._file.read().strip()

    def require_own(self, start: WholeCheckpoint) -> None:
        """Raise CheckpointError if a checkpoint in this directory is another run's."""
        identity = start.run().get("run_id")
        if self._identity and identity and identity != self._identity:
            raise CheckpointError(
                f"checkpoint {start.path} is another run's: move it out of {self.path}, "
                "or start a new run directory with --resume-from it"
            )

    def identify(self, own: WholeCheckpoint | None) -> str:
        """The run's identity: as noted, else that of its own newest checkpoint, else a new one."""
        if not self._identity:
            self._identity = (own.run().get("run_id") if own is not None else None) or uuid.uuid4().hex
            self._file.write(f"{self._identity}\n")
            self._file.flush()
        return self._identity
