"""Adds up the drafters' gradients within a process and across processes and nodes.

Every drafter worker holds one rank of a torch.distributed process group: gloo on CPUs, NCCL on GPUs. The groups are
made directly, over a store that spans all processes of the run, because one process holds several ranks, which
torch.distributed's default group does not know. Drafters that share a GPU (NCCL refuses two ranks on one) first add
up among themselves, in their order, and their first one goes to the group for all.

Which ranks add up in which order depends on their numbers alone, so one process with two drafters computes the very
sums that two processes with one drafter each do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from trainer.errors import Closed
from trainer.exchange.rendezvous import TIMEOUT, Processes, first_line


class ExchangeError(RuntimeError):
    """Drafters could not add up their gradients; as a rule because another process is gone."""


@dataclass(frozen=True)
class Group:
    """All drafters of the run, and which of them live in this process."""

    processes: Processes
    first_drafter: int
    drafters: int  # of all processes
    first_rank: int
    ranks: int  # devices with a drafter, of all processes

    @classmethod
    def of(cls, processes: Processes, local: list[torch.device]) -> Group:
        """Number the drafters of all processes; `local`: the device of each one in this process."""
        everyone = processes.peers.share([len(local), len(_shared(local))])
        before = everyone[: processes.rank]
        return cls(
            processes,
            sum(drafters for drafters, _ in before),
            sum(drafters for drafters, _ in everyone),
            sum(ranks for _, ranks in before),
            sum(ranks for _, ranks in everyone),
        )

    def exchanges(self, local: list[torch.device]) -> list[GradientExchange]:
        """One exchange for each drafter of this process, in their order; see `GradientExchange.connect`."""
        shared = _shared(local)
        barrier = Barrier(len(shared))
        result: list[GradientExchange | None] = [None] * len(local)
        for number, members in enumerate(shared):
            among_devices: GradientExchange = Alone()
            if self.ranks > 1:
                among_devices = Collective(self, self.first_rank + number, local[members[0]], barrier)
            if len(members) == 1:
                result[members[0]] = among_devices
            else:
                device_group = _DeviceGroup(len(members))
                for place, member in enumerate(members):
                    result[member] = SharedDevice(device_group, place, among_devices if place == 0 else Alone())
        return [exchange for exchange in result if exchange is not None]


def _shared(devices: list[torch.device]) -> list[list[int]]:
    """Drafters by the GPU that they share. CPU drafters share nothing: each stands for a device of its own."""
    if devices and devices[0].type != "cuda":
        return [[number] for number in range(len(devices))]
    groups: dict[torch.device, list[int]] = {}
    for number, device in enumerate(devices):
        groups.setdefault(device, []).append(number)
    return list(groups.values())


class GradientExchange(Protocol):
    """One drafter's part in the exchange. All drafters must make the same calls in the same order."""

    def connect(self) -> None:
        """Join the group, in the worker's thread; returns when all have. Raises as `all_reduce` does."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Replace the buffer by the sum over all drafters; on CUDA enqueued on the current stream.

        Raises:
            Closed: another worker of this process failed.
            ExchangeError: the library failed; as a rule because another process is gone.
        """

    def abort(self) -> None:
        """Wake everyone who waits for a drafter of this process; from any thread."""

    def close(self) -> None:
        """Leave the group, in the worker's thread."""


class Alone:
    """The only drafter."""

    def connect(self) -> None: ...

    def all_reduce(self, buffer: Tensor) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Barrier:
    """Lets threads wait for each other, again and again. All pass it or none does: one that passed alone would wait
    inside a collective that the others have given up.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._arrived = self._passed = 0  # at the barrier now; times that all have passed it
        self.aborted = False
        self._changed = threading.Condition()

    def wait(self) -> None:
        """Wait for all.

        Raises:
            Closed: the barrier was aborted before all had come.
        """
        with self._changed:
            if self.aborted:
                raise Closed
            number = self._passed
            self._arrived += 1
            if self._arrived == self._members:
                self._arrived, self._passed = 0, number + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._passed > number or self.aborted)
            if self._passed == number:
                raise Closed

    def abort(self) -> None:
        """Let nobody pass from now on; wakes everyone."""
        with self._changed:
            self.aborted = True
            self._changed.notify_all()


class Collective:
    """A rank of a gloo or NCCL group."""

    def __init__(self, group: Group, rank: int, device: torch.device, barrier: Barrier) -> None:
        self._group, self._rank, self._device = group, rank, device
        # Ranks of this process wait for each other before each collective: a failure among them then ends a wait that
        # can be broken, not one inside the library.
        self._barrier = barrier
        self._ranks: Any = None

    def connect(self) -> None:
        # A client of its own for each rank: one that waits for a key keeps others of its client from setting theirs.
        store = PrefixStore("exchange", self._group.processes.store.clone())
        if self._device.type == "cuda":
            from torch.distributed.distributed_c10d import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            with self._as_one_of_many():
                self._ranks = ProcessGroupNCCL(store, self._rank, self._group.ranks, options)
        else:
            with self._as_one_of_many():
                self._ranks = ProcessGroupGloo(store, self._rank, self._group.ranks, TIMEOUT)
        self.all_reduce(torch.zeros(1, device=self._device))  # NCCL connects at the first collective

    def all_reduce(self, buffer: Tensor) -> None:
        self._barrier.wait()
        with self._as_one_of_many():
            self._ranks.allreduce([buffer]).wait()

    @contextlib.contextmanager
    def _as_one_of_many(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._barrier.aborted:  # the run is ending: another drafter of this process has left
                raise Closed from error
            raise ExchangeError(f"the drafters could not add up their gradients: {first_line(error)}") from error

    def abort(self) -> None:
        self._barrier.abort()

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.shutdown()
            self._ranks = None


class _DeviceGroup:
    """What the drafters of one device share: a barrier, and the buffers that they reduce."""

    def __init__(self, members: int) -> None:
        self.barrier = Barrier(members)
        self.buffers: list[Tensor | None] = [None] * members
        self.events: list[torch.cuda.Event | None] = [None] * members


class SharedDevice:
    """One of several drafters on one device: the first adds up for all."""

    def __init__(self, device_group: _DeviceGroup, place: int, outside: GradientExchange) -> None:
        self._device_group, self._place, self._outside = device_group, place, outside

    def connect(self) -> None:
        self._outside.connect()

    def all_reduce(self, buffer: Tensor) -> None:
        device_group, first = self._device_group, self._place == 0
        device_group.buffers[self._place] = buffer
        self._mark()
        device_group.barrier.wait()
        if first:
            for place in range(1, len(device_group.buffers)):
                self._after(place)
                other = device_group.buffers[place]
                assert other is not None
                buffer.add_(other)
            self._outside.all_reduce(buffer)
            self._mark()
        device_group.barrier.wait()
        if not first:
            self._after(0)
            total = device_group.buffers[0]
            assert total is not None
            buffer.copy_(total)
            self._mark()
        device_group.barrier.wait()
        if first:  # its buffer must not change before the others have read it
            for place in range(1, len(device_group.buffers)):
                self._after(place)

    def abort(self) -> None:
        self._device_group.barrier.abort()
        self._outside.abort()

    def close(self) -> None:
        self._outside.close()

    def _mark(self) -> None:
        """Say that what this drafter's stream holds so far is what the others may build on."""
        buffer = self._device_group.buffers[self._place]
        if buffer is not None and buffer.is_cuda:
            self._device_group.events[self._place] = torch.cuda.current_stream(buffer.device).record_event()

    def _after(self, place: int) -> None:
        """Let this drafter's stream wait for another's mark."""
        event = self._device_group.events[place]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
