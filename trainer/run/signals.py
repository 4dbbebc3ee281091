"""Turns signals into flags that the pipeline polls.

SIGTERM and SIGINT let the step finish and save; before training begins there is nothing to save and the exit is at
once. A run that SIGTERM stopped exits with 0, for a service manager asked it to. Ctrl-C comes from a person: 130 keeps
their shell from going on with what was to follow the run, and a second one does not wait for the step. SIGUSR2 saves
and goes on. SIGUSR1 writes the stack of every thread to the log, and so does SIGABRT, with which systemd's watchdog
ends a stuck run.

Imports nothing heavy: the handlers must stand before the seconds that importing torch takes, in which the default
action of SIGUSR2 would end the process.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from types import FrameType

logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """A second Ctrl-C: whoever asked does not want to wait."""


class Signals:
    """Takes the process's signals when it is made; for the main thread.

    The flags are plain: setting a threading.Event takes a lock, which the code that the signal interrupts may hold.
    """

    def __init__(self) -> None:
        self.training = False
        self.stop = False
        self.exit_code = 0
        """Of a run that was stopped"""
        self._checkpoint = False
        faulthandler.enable()  # SIGABRT among others: every thread's stack goes to stderr, then the process dies
        # Not faulthandler.register: its handler reads the frames of threads that go on running, which was seen to crash
        # a healthy run. A Python handler holds the interpreter's lock meanwhile.
        signal.signal(signal.SIGUSR1, lambda number, frame: faulthandler.dump_traceback())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR2, self._on_checkpoint)

    def take_checkpoint_request(self) -> bool:
        """True once per request."""
        if self._checkpoint:
            self._checkpoint = False
            return True
        return False

    def _on_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # First of all, since what is raised below is lost where the signal interrupts a destructor.
        again, self.stop = self.stop, True
        if number == signal.SIGINT:
            self.exit_code = 130
        if not self.training:
            logger.info("%s before training began: leaving", name)
            sys.exit(self.exit_code)
        if number == signal.SIGINT and again:
            raise Interrupted("second Ctrl-C")
        logger.info("%s: finishing the step, then saving", name)
