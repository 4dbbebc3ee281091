"""Passes work from one thread to the next, in order, bounded, and without hanging.

A `Ring` hands items over in the order of their sequence numbers, whatever the order in which they arrive. Item k has
place k % depth to itself from `reserve` to `release`, so a place can stand for a buffer on a device. A producer waits
for its own place only: the lowest outstanding item can always go on, hence no deadlock however slow anyone is. `close`
wakes everyone: from then on each call raises `Closed`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer.errors import Closed

T = TypeVar("T")


class Ring(Generic[T]):
    """A bounded hand-over for many producers and consumers, in sequence order."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._items: dict[int, T] = {}
        self._next = 0  # the item that `take` hands out next
        self._released: set[int] = set()
        self._low = 0  # every item below is released
        self._end: int | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._since = self._start = time.monotonic()
        self._filled = 0.0  # items waiting, integrated over seconds

    def reserve(self, k: int) -> int:
        """Wait until the place of item k is free, and return it.

        Raises:
            Closed: the run is ending.
        """
        with self._changed:
            self._wait(lambda: k < self._low + self.depth)
        return k % self.depth

    def put(self, k: int, item: T) -> None:
        """Hand over item k, whose place was reserved."""
        with self._changed:
            if self._closed:
                raise Closed
            self._count()
            self._items[k] = item
            self._changed.notify_all()

    def take(self) -> tuple[int, T] | None:
        """Wait for the next item in order; None when `finish` said that there is none.

        Raises:
            Closed: the run is ending.
        """
        with self._changed:
            self._wait(lambda: self._next in self._items or self._next == self._end)
            if self._next == self._end:
                return None
            self._count()
            k, self._next = self._next, self._next + 1
            return k, self._items.pop(k)

    def release(self, k: int) -> None:
        """Give the place of item k back."""
        with self._changed:
            self._released.add(k)
            while self._low in self._released:
                self._released.remove(self._low)
                self._low += 1
            self._changed.notify_all()

    def finish(self, end: int) -> None:
        """Say that item end - 1 is the last one."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everyone with `Closed`."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def occupancy(self) -> float:
        """Mean share of the places that held a waiting item since the last call."""
        with self._changed:
            self._count()
            seconds = self._since - self._start
            share = self._filled / seconds / self.depth if seconds > 0 else 0.0
            self._start, self._filled = self._since, 0.0
            return share

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or ready())
        if self._closed:
            raise Closed

    def _count(self) -> None:
        now = time.monotonic()
        self._filled += len(self._items) * (now - self._since)
        self._since = now
