"""Brings the processes of a run together and makes sure that they begin alike."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils._pytree import keystr, tree_flatten_with_path

from trainer.exchange.peers import PeerError, Peers, SetupError, rank_and_world_size

log = logging.getLogger(__name__)
T = TypeVar("T")


TIMEOUT = timedelta(minutes=10)  # of meeting and of a collective; a peer that dies is noticed at once, see `Peers`
WATCH_SECONDS = 0.2
LEAVE_SECONDS = 2.0  # for a main thread to leave by itself before training, when another process has failed


@dataclass(frozen=True)
class Processes:
    """All processes of the run, which have met. As a context manager it tells the others how this one ended."""

    store: Any = field(default_factory=HashStore)  # torch.distributed.Store
    rank: int = 0
    world_size: int = 1
    peers: Peers = field(default_factory=Peers)
    _trains: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def rendezvous(cls) -> Processes:
        """Meet the run's other processes, if torchrun's environment variables tell of any.

        Raises:
            SetupError: the others can't be met, or are of another run.
            PeerError: one of them failed, died or did not come.
        """
        rank, world_size = rank_and_world_size()
        if world_size == 1:
            return cls()
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        log.info("process %d of %d meets the others at %s", rank, world_size, where)
        try:
            processes = _in_a_thread(lambda: cls._rendezvous(rank, world_size))
        except (PeerError, SetupError):
            raise
        except (ValueError, RuntimeError, OSError) as error:
            raise SetupError(
                f"process {rank} of {world_size} could not meet the others at {where}: {first_line(error)}"
            ) from error
        threading.Thread(target=processes._watch, name="peers", daemon=True).start()
        return processes

    @classmethod
    def _rendezvous(cls, rank: int, world_size: int) -> Processes:
        # Torchrun's agent may serve the store already; else process 0 has to. Nobody waits here for the others to
        # come to the store: who comes and dies is seen only by those who have met.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Any = TCPStore(host, port, is_master=serves, timeout=TIMEOUT, wait_for_workers=False)
        # The agent's store outlives processes that it starts anew, and remembers where the former ones were found.
        store = PrefixStore(f"dflash/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        return cls(store, rank, world_size, Peers.connect(store, rank, world_size, TIMEOUT))

    def _watch(self) -> None:
        """Until training begins: end this process when another one fails, whatever the main thread is busy with.

        That thread may read data or load a target for many minutes, and can't be interrupted everywhere. There is
        nothing to save yet.
        """
        while not self._trains.wait(WATCH_SECONDS):
            if (failure := self.peers.failure()) is None:
                continue
            self.peers.tell_failure("another process", PeerError(failure))
            if self._trains.wait(LEAVE_SECONDS):  # the main thread has seen it too, or fails for the same reason
                return
            log.error("run failed: another process failed: PeerError: %s", failure)
            logging.shutdown()
            for child in multiprocessing.active_children():  # readers of data would wait for ever
                child.kill()
            os._exit(1)

    def begin_training(self) -> None:
        """From now on the caller looks at `peers` itself, several times a second."""
        self._trains.set()

    def agree(self, what: Mapping[str, Any]) -> None:
        """Compare what has to be the same in all processes, by the name that people know it by; JSON-able.

        Replicas that begin apart stay apart, and no sum of gradients shows it.

        Raises:
            SetupError: something differs; in all processes alike.
            PeerError: another process failed or died.
        """
        if difference := _difference(self.peers.share(dict(what))):
            self.peers.leave()  # all others find the same
            raise SetupError(difference)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._trains.set()
        if error is not None:
            self.peers.tell_failure("main", error)
            self.peers.close()
        else:
            self.peers.leave()


def _in_a_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises. The caller can be interrupted by signals, which torch's waiting can't."""
    result: Future[T] = Future()

    def body() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=body, name="meeting", daemon=True).start()
    return result.result()


def first_line(error: BaseException) -> str:
    """What an error says, without the C++ frames that torch appends."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _difference(agreed: list[dict[str, Any]]) -> str | None:
    """A sentence on the first thing that a process has otherwise than process 0."""
    first = agreed[0]
    for rank, other in enumerate(agreed[1:], start=1):
        for name in first | other:
            if first.get(name) != other.get(name):
                return (
                    f"the processes of a run must begin alike, but process 0 has {name} {first.get(name)} and process "
                    f"{rank} has {other.get(name)}: give all of them the same configuration, data, target and "
                    "checkpoint"
                )
    return None


def digest(state: Any) -> str:
    """A short hash of tensors [CPU] and plain values in mappings and sequences, such as a state_dict."""
    found = hashlib.sha256()
    leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(state)[0]]
    leaves.sort(key=lambda item: item[0])
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter
        for described in pool.map(lambda item: f"{item[0]} {_describe(item[1])}\n", leaves):
            found.update(described.encode())
    return found.hexdigest()[:16]


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    content = leaf.contiguous().flatten().view(torch.uint8).numpy().data
    return f"{leaf.dtype} {list(leaf.shape)} {hashlib.sha256(content).hexdigest()}"
