"""Gradients are added up alike for all, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer.errors import Closed
from trainer.exchange.reduce import Alone, Barrier, ExchangeError, GradientExchange, Group, SharedDevice, _DeviceGroup
from trainer.exchange.rendezvous import Processes

CPU = torch.device("cpu")


def in_threads(exchanges: list[GradientExchange], work: Callable[[int, GradientExchange], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            work(number, exchanges[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def gradients(number: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(number))


def gloo(count: int) -> list[GradientExchange]:
    devices = [CPU] * count
    return Group.of(Processes.rendezvous(), devices).exchanges(devices)


def sharing_a_device(count: int) -> list[GradientExchange]:
    room = _DeviceGroup(count)
    return [SharedDevice(room, place, Alone()) for place in range(count)]


@pytest.mark.parametrize("make", [gloo, sharing_a_device])
@pytest.mark.parametrize("count", [2, 3])
def test_every_drafter_gets_the_same_sum_and_the_same_one_each_time(
    make: Callable[[int], list[GradientExchange]], count: int
) -> None:
    outcomes = []
    for _ in range(2):
        exchanges = make(count)
        buffers = [gradients(number) for number in range(count)]

        def work(number: int, exchange: GradientExchange, buffers: list[torch.Tensor] = buffers) -> None:
            exchange.connect()
            for _ in range(3):
                buffers[number].copy_(gradients(number))
                exchange.all_reduce(buffers[number])
            exchange.close()

        assert in_threads(exchanges, work) == []
        assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
        outcomes.append(buffers[0])
    torch.testing.assert_close(outcomes[0], sum(gradients(number) for number in range(count)))
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("make", [gloo, sharing_a_device])
def test_a_drafter_that_never_comes_does_not_hold_the_others_for_ever(
    make: Callable[[int], list[GradientExchange]],
) -> None:
    exchanges = make(3)
    waiting = threading.Barrier(3)

    def work(number: int, exchange: GradientExchange) -> None:
        exchange.connect()
        waiting.wait()
        if number == 2:
            exchange.abort()
        else:
            exchange.all_reduce(gradients(number))

    errors = in_threads(exchanges, work)
    assert [type(error) for error in errors] == [Closed, Closed]


def test_all_go_on_from_a_meeting_or_none_does() -> None:
    for _ in range(100):
        barrier = Barrier(2)
        errors: list[BaseException] = []

        def first(barrier: Barrier = barrier, errors: list[BaseException] = errors) -> None:
            try:
                barrier.wait()
            except Closed as error:
                errors.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        barrier.wait()
        barrier.abort()  # the other has not woken up yet, as a rule
        thread.join()
        assert errors == []
        with pytest.raises(Closed):
            barrier.wait()


@pytest.mark.parametrize(("ends", "expected"), [(True, Closed), (False, ExchangeError)])
def test_a_broken_connection_is_a_failure_unless_the_run_is_ending(
    ends: bool, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, _ = gloo(2)

    def connect(*_: Any) -> None:
        if ends:
            exchange.abort()
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("trainer.exchange.reduce.ProcessGroupGloo", connect)
    with pytest.raises(expected):
        exchange.connect()


def test_one_drafter_alone_keeps_its_gradients() -> None:
    (exchange,) = gloo(1)
    assert isinstance(exchange, Alone)
    buffer = gradients(0)
    exchange.all_reduce(buffer)
    assert torch.equal(buffer, gradients(0))


def test_drafters_on_one_gpu_are_one_rank() -> None:
    gpus = [torch.device("cuda", number) for number in (1, 1, 2, 1)]
    group = Group.of(Processes.rendezvous(), gpus)
    assert (group.drafters, group.ranks) == (4, 2)
    assert [type(exchange).__name__ for exchange in group.exchanges(gpus)] == [
        "SharedDevice",
        "SharedDevice",
        "Collective",
        "SharedDevice",
    ]
