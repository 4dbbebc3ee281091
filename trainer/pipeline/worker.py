"""Runs a thread that prepares when told, works when all are prepared, and never dies unseen.

A worker never waits without a way to be woken: all waits are on rings and barriers that `Shared.fail` closes.
"""

from __future__ import annotations

import logging
import threading

import torch

from trainer.errors import Closed
from trainer.pipeline.meter import Meter
from trainer.pipeline.shared import Shared
from trainer.pipeline.threads import working_on

log = logging.getLogger(__name__)


class Worker(threading.Thread):
    """A thread that prepares when told, works when all are prepared, and never dies unseen."""

    def __init__(self, name: str, shared: Shared, device: torch.device) -> None:
        super().__init__(name=name, daemon=True)  # a thread stuck in a driver must not keep the process alive
        self.shared = shared
        self.device = device
        self.meter = Meter(device)
        self.stream: torch.cuda.Stream | None = None
        self.may_prepare = threading.Event()
        self.prepared = threading.Event()
        self.saving = threading.Event()  # a state is on its way to a checkpoint: at the end, worth more patience

    def run(self) -> None:
        """Prepare, wait for the others, work; hand any exception to the supervisor."""
        try:
            with working_on(self.device) as self.stream:
                self.may_prepare.wait()
                self._go_on()
                self.prepare()
                self.prepared.set()
                self.shared.started.wait()
                self._go_on()
                self.work()
        except Closed:
            pass
        except BaseException as error:
            self.shared.fail(self.name, error)
        finally:
            self.prepared.set()
            try:
                self.end()
            except Exception as error:  # peers are gone, or the device: what there was to say has been said
                log.warning("%s did not end cleanly: %s", self.name, error)

    def prepare(self) -> None:
        """Build and compile; one worker at a time."""

    def work(self) -> None:
        """Work until there is no more, or `Closed`."""
        raise NotImplementedError

    def end(self) -> None:
        """Give back what would outlive the thread."""

    def _go_on(self) -> None:
        if self.shared.ending.is_set():
            raise Closed
