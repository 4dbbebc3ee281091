"""Rings: order, bounds, and the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from trainer.errors import Closed
from trainer.pipeline.queues import Ring


def start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_come_out_in_sequence_whatever_the_order_they_are_made_in(depth: int) -> None:
    ring: Ring[str] = Ring(depth)
    numbers = iter(range(200))
    lock = threading.Lock()

    def produce(seed: int) -> None:
        pause = random.Random(seed)
        while True:
            with lock:
                k = next(numbers, None)
            if k is None:
                return
            assert ring.reserve(k) == k % depth
            threading.Event().wait(pause.random() / 2000)
            ring.put(k, f"item {k}")

    producers = [start(lambda seed=seed: produce(seed)) for seed in range(4)]
    for k in range(200):
        assert ring.take() == (k, f"item {k}")
        ring.release(k)
    for producer in producers:
        producer.join()


def test_no_more_items_are_reserved_than_there_are_places_until_one_is_released() -> None:
    ring: Ring[int] = Ring(2)
    ring.reserve(0), ring.reserve(1)
    reserved = threading.Event()

    def third() -> None:
        ring.reserve(2)
        reserved.set()

    thread = start(third)
    ring.put(0, 0)
    assert ring.take() == (0, 0)
    assert not reserved.wait(0.05)  # taken is not yet released: the place is still being read
    ring.release(0)
    thread.join(10)
    assert reserved.is_set()


def test_a_finished_ring_hands_out_what_it_holds_and_then_none() -> None:
    ring: Ring[int] = Ring(3)
    ring.reserve(0)
    ring.put(0, 7)
    ring.finish(1)
    assert ring.take() == (0, 7)
    assert ring.take() is None


def test_closing_wakes_everyone_who_waits_and_refuses_those_who_come() -> None:
    ring: Ring[int] = Ring(1)
    ring.reserve(0)
    woken: list[str] = []

    def wait_for(call: Callable[[], object], name: str) -> None:
        try:
            call()
        except Closed:
            woken.append(name)

    threads = [start(lambda: wait_for(ring.take, "take")), start(lambda: wait_for(lambda: ring.reserve(1), "reserve"))]
    ring.close()
    for thread in threads:
        thread.join(10)
    assert sorted(woken) == ["reserve", "take"]
    for call in (ring.take, lambda: ring.reserve(0), lambda: ring.put(0, 1)):
        with pytest.raises(Closed):
            call()


def test_occupancy_is_the_share_of_places_with_a_waiting_item() -> None:
    ring: Ring[int] = Ring(2)
    ring.occupancy()
    ring.reserve(0)
    ring.put(0, 0)
    threading.Event().wait(0.05)
    assert ring.occupancy() == pytest.approx(0.5, abs=0.01)
    ring.take()
    ring.occupancy()
    threading.Event().wait(0.01)
    assert ring.occupancy() == 0.0
