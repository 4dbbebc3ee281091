"""Adding up among threads, processes and drafters that share a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.trainer.launching import CONTEXT
from tests.trainer.pipeline import tiny
from trainer.exchange.peers import SetupError
from trainer.exchange.reduce import (
    Alone,
    Exchange,
    ExchangeError,
    Group,
    Meeting,
    Processes,
    SharedDevice,
    _Room,
    digest,
)
from trainer.pipeline.queues import Closed
from trainer.pipeline.types import PipelineError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def in_threads(exchanges: list[Exchange], work: Callable[[int, Exchange], None]) -> list[BaseException]:
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


def gloo(count: int) -> list[Exchange]:
    devices = [CPU] * count
    return Group.of(Processes.meet(), devices).exchanges(devices)


def sharing_a_device(count: int) -> list[Exchange]:
    room = _Room(count)
    return [SharedDevice(room, place, Alone()) for place in range(count)]


@pytest.mark.parametrize("make", [gloo, sharing_a_device])
@pytest.mark.parametrize("count", [2, 3])
def test_every_drafter_gets_the_same_sum_and_the_same_one_each_time(
    make: Callable[[int], list[Exchange]], count: int
) -> None:
    outcomes = []
    for _ in range(2):
        exchanges = make(count)
        buffers = [gradients(number) for number in range(count)]

        def work(number: int, exchange: Exchange, buffers: list[torch.Tensor] = buffers) -> None:
            exchange.connect()
            for _ in range(3):
                buffers[number].copy_(gradients(number))
                exchange.add_up(buffers[number])
            exchange.close()

        assert in_threads(exchanges, work) == []
        assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
        outcomes.append(buffers[0])
    torch.testing.assert_close(outcomes[0], sum(gradients(number) for number in range(count)))
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("make", [gloo, sharing_a_device])
def test_a_drafter_that_never_comes_does_not_hold_the_others_for_ever(make: Callable[[int], list[Exchange]]) -> None:
    exchanges = make(3)
    waiting = threading.Barrier(3)

    def work(number: int, exchange: Exchange) -> None:
        exchange.connect()
        waiting.wait()
        if number == 2:
            exchange.abort()
        else:
            exchange.add_up(gradients(number))

    errors = in_threads(exchanges, work)
    assert [type(error) for error in errors] == [Closed, Closed]


def test_all_go_on_from_a_meeting_or_none_does() -> None:
    for _ in range(100):
        meeting = Meeting(2)
        errors: list[BaseException] = []

        def first(meeting: Meeting = meeting, errors: list[BaseException] = errors) -> None:
            try:
                meeting.wait()
            except Closed as error:
                errors.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        meeting.wait()
        meeting.abort()  # the other has not woken up yet, as a rule
        thread.join()
        assert errors == []
        with pytest.raises(Closed):
            meeting.wait()


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
    exchange.add_up(buffer)
    assert torch.equal(buffer, gradients(0))


def test_drafters_on_one_gpu_are_one_rank() -> None:
    gpus = [torch.device("cuda", number) for number in (1, 1, 2, 1)]
    group = Group.of(Processes.meet(), gpus)
    assert (group.drafters, group.ranks) == (4, 2)
    assert [type(exchange).__name__ for exchange in group.exchanges(gpus)] == [
        "SharedDevice",
        "SharedDevice",
        "Collective",
        "SharedDevice",
    ]


@pytest.mark.parametrize(
    ("name", "mine", "theirs"), [("start step", 3, 5), ("rows", "abc", "abd"), ("total steps", 9, None)]
)
def test_processes_that_begin_apart_are_refused_in_one_sentence(name: str, mine: Any, theirs: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = (
        "import json, sys\n"
        "from trainer.exchange.reduce import Processes\n"
        "from trainer.exchange.peers import SetupError\n"
        "try:\n"
        "    Processes.meet().agree(json.loads(sys.argv[1]))\n"
        "except SetupError as error:\n"
        "    sys.exit(str(error))\n"
    )
    processes = []
    for rank, value in enumerate((mine, theirs)):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-c", script, json.dumps({"seed": 0, name: value})]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"process 0 has {name} {mine} and process 1 has {theirs}: give all of them the same" in said
        assert "Traceback" not in said


def join_and_add_up(rank: int, port: int, attempt: int) -> None:
    """One of two processes that torchrun started for the `attempt`th time; they end without leaving."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    (exchange,) = Group.of(Processes.meet(), [CPU]).exchanges([CPU])
    exchange.connect()
    buffer = torch.ones(3)
    exchange.add_up(buffer)
    assert buffer.tolist() == [2.0] * 3
    os._exit(0)


def test_processes_that_torchrun_starts_anew_find_each_other_though_its_store_remembers_the_dead() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        processes = [CONTEXT.Process(target=join_and_add_up, args=(rank, store.port, attempt)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]


def test_a_process_that_does_not_come_to_the_meeting_is_a_failure_and_no_wrong_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.exchange.reduce.TIMEOUT", timedelta(seconds=1))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", store.port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(PipelineError, match="another process failed: PeerError: process 1 did not come"):
        tiny.train(tiny.run_config())


def test_a_meeting_point_that_nobody_serves_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.exchange.reduce.TIMEOUT", timedelta(seconds=1))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"process 1 of 2 could not meet the others at 127\.0\.0\.1:9"):
        Processes.meet()


def test_a_digest_tells_any_difference_and_nothing_else() -> None:
    a = torch.arange(6, dtype=torch.bfloat16)
    state: dict[str, Any] = {"a": a, "b": {"step": torch.tensor(3), "name": "x"}, "c": torch.ones(0)}
    same = {"c": torch.ones(0), "b": dict(state["b"]), "a": a.clone()}
    assert digest(state) == digest(same)
    for change in (
        {"a": a.float()},
        {"a": a.reshape(2, 3)},
        {"a": a.flip(0)},
        {"b": {"step": torch.tensor(4), "name": "x"}},
        {"b": {"step": torch.tensor(3), "name": "y"}},
        {"d": 1},
    ):
        assert digest({**state, **change}) != digest(state)
