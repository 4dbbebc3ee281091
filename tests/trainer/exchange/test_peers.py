"""How the processes of a run meet, and what they hear of each other's end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from trainer.exchange import peers
from trainer.exchange.peers import PeerError, Peers, SetupError

pytestmark = pytest.mark.timeout(60)
HOST = socket.gethostname()
LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def port_and_token(store: Any) -> dict[str, Any]:
    return dict(json.loads(store.get(peers._RENDEZVOUS_KEY)))


@contextmanager
def met(count: int) -> Iterator[list[Peers]]:
    """What each of so many processes, played by threads, holds after they have met."""
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda n: Peers.connect(store, n, count, LONG), range(count)))
    yield found
    for peer in found:
        peer.close()


def heard(peer: Peers) -> str:
    while (failure := peer.failure()) is None:
        time.sleep(0.01)
    return failure


def test_what_each_hands_over_reaches_all_in_their_order_time_and_again() -> None:
    with met(3) as all_of_them, ThreadPoolExecutor(3) as pool:
        for turn in range(3):
            shared = list(pool.map(lambda peer: peer.share({"n": peer._rank, "turn": turn}), all_of_them))  # noqa: B023
            assert shared == [[{"n": n, "turn": turn} for n in range(3)]] * 3


def test_who_looks_for_failures_does_not_lose_what_others_hand_over() -> None:
    with met(2) as (zero, one), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.share, "one")
        for _ in range(10):
            assert zero.failure() is None
            time.sleep(0.01)
        assert zero.share("zero") == waiting.result(10) == ["zero", "one"]


def test_one_that_dies_or_leaves_before_it_hands_over_ends_the_waiting_of_all() -> None:
    for end, said in (
        (Peers.close, rf"^process 2 on {HOST} died without a word$"),
        (Peers.leave, r"^process 2 ended before all had begun$"),
    ):
        with met(3) as (zero, one, two), ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(peer.share, None) for peer in (zero, one)]
            time.sleep(0.1)
            end(two)
            with pytest.raises(PeerError, match=said) as failure:
                waiting[0].result(10)
            zero.tell_failure("main", failure.value)
            with pytest.raises(PeerError, match=said):
                waiting[1].result(10)


def test_a_failure_reaches_everyone_in_the_words_of_the_one_who_failed() -> None:
    with met(3) as (zero, one, two):
        assert [peer.failure() for peer in (zero, one, two)] == [None] * 3
        two.tell_failure("target 0", OSError("no such row"))
        two.close()
        said = f"process 2 on {HOST}: target 0 failed: OSError: no such row"
        assert heard(zero) == said
        zero.tell_failure("another process", PeerError(said))
        zero.close()
        assert heard(one) == said


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_gone_without_a_word_is_named(number: int) -> None:
    with met(2) as both:
        both[number].close()
        assert heard(both[1 - number]) == f"process {number} on {HOST} died without a word"
        assert heard(both[1 - number]) == f"process {number} on {HOST} died without a word"  # asked again


def test_a_process_that_was_stopped_says_so() -> None:
    with met(2) as (zero, one):
        one.tell_failure("main", SystemExit(0))
        assert heard(zero) == f"process 1 on {HOST} was stopped before training began"


def test_those_who_are_done_are_no_failure_and_process_0_leaves_last() -> None:
    with met(3) as (zero, one, two), ThreadPoolExecutor(1) as pool:
        one.leave()
        leaving = pool.submit(zero.leave)
        time.sleep(0.3)
        assert not leaving.done()
        assert two.failure() is None
        two.leave()
        leaving.result(5)
        assert [peer.failure() for peer in (zero, one, two)] == [None] * 3


def test_process_0_waits_only_so_long_for_one_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LEAVE_SECONDS", 0.2)
    with met(2) as (zero, _):
        start = time.monotonic()
        zero.leave()
        assert time.monotonic() - start < 5


def test_strangers_at_the_meeting_point_disturb_nobody() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(Peers.connect, store, 0, 2, LONG)
        port = port_and_token(store)["port"]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
        strangers[1].sendall(b'{"token": "guessed", "process": 1, "host": "x"}\n[1]\n')
        strangers[2].close()
        one = pool.submit(Peers.connect, store, 1, 2, LONG)
        met = [future.result(30) for future in (zero, one)]
    assert [peer.failure() for peer in met] == [None, None]
    for peer in met:
        peer.close()
    for stranger in strangers:
        stranger.close()


@contextmanager
def awaited() -> Iterator[tuple[Any, int, Future[Peers]]]:
    """Process 0 of two at its meeting point: the store, the port, and what it becomes."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(Peers.connect, store, 0, 2, LONG)
        yield store, port_and_token(store)["port"], zero


def both_meet(store: Any, zero: Future[Peers]) -> None:
    one = Peers.connect(store, 1, 2, LONG)
    assert (zero.result(10).failure(), one.failure()) == (None, None)
    one.close()
    zero.result().close()


def test_a_stranger_who_nests_deeply_or_never_stops_disturbs_nobody() -> None:
    with awaited() as (store, port, zero):
        talkers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        talkers[0].sendall(b"[" * 60_000 + b"\n")
        ended = threading.Event()

        def talk() -> None:
            try:
                while True:
                    talkers[1].sendall(b"x" * 2**20)
            except ConnectionError:
                ended.set()

        threading.Thread(target=talk, daemon=True).start()
        assert ended.wait(10)
        both_meet(store, zero)
        for talker in talkers:
            talker.close()


def test_strangers_who_hold_their_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "STRANGER_SECONDS", 1.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        "import socket, sys, time\n"
        "held = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(200)]\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with awaited() as (store, port, zero):
        used = len(list(Path("/proc/self/fd").iterdir()))
        command = [sys.executable, "-c", program, str(port)]
        strangers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
        try:
            assert strangers.stdout is not None
            assert strangers.stdout.readline() == "held\n"
            time.sleep(2)  # process 0 has no descriptor left, and goes on
            assert not zero.done()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        both_meet(store, zero)
        strangers.communicate("")


def test_hundreds_who_come_and_go_do_not_hold_up_who_is_awaited() -> None:
    with awaited() as (store, port, zero):
        for _ in range(300):
            socket.create_connection(("127.0.0.1", port)).close()
        begin = time.monotonic()
        both_meet(store, zero)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.3.2.1", "127.3.2.1"),
        ("::1", "::1"),
        ("0.0.0.0", None),
        ("10.0.0.1", None),
        ("node-1", None),
    ],
)
def test_processes_of_one_host_meet_where_no_other_host_can_come(address: str, loopback: str | None) -> None:
    assert peers._loopback(address) == loopback
    if loopback == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with peers._server(loopback) as server:
        assert server.getsockname()[0] == (loopback or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"))


def test_processes_meet_at_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with met(2) as (zero, one):
        assert [peer.failure() for peer in (zero, one)] == [None, None]


@pytest.mark.parametrize(
    ("number", "processes", "said"),
    [
        (
            1,
            3,
            rf"^process 0 on {HOST} was started with WORLD_SIZE=4, process 1 on {HOST} with WORLD_SIZE=3: start all",
        ),
        (
            5,
            6,
            rf"^process 0 on {HOST} was started with WORLD_SIZE=4, process 5 on {HOST} with WORLD_SIZE=6: start all",
        ),
        (2, 4, rf"^two processes were started with RANK=2, process 2 on {HOST} and process 2 on {HOST}: give each"),
    ],
)
def test_a_process_of_another_run_or_number_is_refused_in_words_that_reach_all(
    number: int, processes: int, said: str
) -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(Peers.connect, store, n, 4, LONG) for n in (0, 2)]
        time.sleep(0.5)
        waiting.append(pool.submit(Peers.connect, store, number, processes, LONG))
        for future in waiting:
            with pytest.raises(SetupError, match=said):
                future.result(10)


def test_a_number_that_is_used_again_after_all_have_met_is_said() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda n: Peers.connect(store, n, 2, LONG), range(2)))
    with pytest.raises(PeerError, match=r"^process 0 on 127\.0\.0\.1 awaits nobody any more: it ended, or RANK=1 was"):
        Peers.connect(store, 1, 2, LONG)
    for peer in both:
        peer.close()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),
        ({"WORLD_SIZE": "3", "RANK": "2", "MASTER_PORT": "29500"}, (2, 3)),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two': it must be a whole number of at least 1, as torchrun sets it"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "1"}, "RANK is '1': it must be a whole number from 0 to 0 when WORLD_SIZE is 1"),
        ({"WORLD_SIZE": "2"}, "RANK is not set: it must be a whole number from 0 to 1 when WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is '2'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_PORT is not set: it must be a whole number from 1 to 65535"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "1", "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_the_place_in_the_run_is_checked(
    variables: dict[str, str], place: tuple[int, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(place, tuple):
        assert peers.rank_and_world_size() == place
    else:
        with pytest.raises(SetupError) as refused:
            peers.rank_and_world_size()
        assert str(refused.value).startswith(place)


def test_process_0_that_dies_before_all_have_met_is_named() -> None:
    program = (
        "import time\n"
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "time.sleep(60)\n"
    )
    zero = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert zero.stdout is not None
    store = TCPStore("127.0.0.1", int(zero.stdout.readline()), is_master=False, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(Peers.connect, store, 1, 2, LONG)
        time.sleep(0.5)
        zero.kill()
        with pytest.raises(PeerError, match=r"^process 0 on 127\.0\.0\.1 died before all had met$"):
            one.result(10)
    zero.communicate()


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(PeerError, match=r"^process 1, 2 did not come$"):
        Peers.connect(HashStore(), 0, 3, timedelta(seconds=0.1))


def test_one_that_dies_while_others_are_awaited_ends_the_waiting_of_all() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[Any]] = [pool.submit(Peers.connect, store, number, 4, LONG) for number in (0, 1)]
        meeting = port_and_token(store)
        with socket.create_connection(("127.0.0.1", meeting["port"])) as dying:
            hello = {"token": meeting["token"], "process": 2, "processes": 4, "host": "there"}
            dying.sendall(json.dumps(hello).encode() + b"\n")
        with pytest.raises(PeerError, match=r"^process 2 on there died without a word$"):
            waiting[0].result(10)
        # It hears why, if it had introduced itself by then.
        with pytest.raises(PeerError, match=r"^process (2 on there died|0 on 127.0.0.1 (ended|awaits nobody))"):
            waiting[1].result(10)


def test_a_word_that_comes_in_pieces_is_one_word() -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    line = peers.Line(ours.accept()[0])
    ours.close()
    text = json.dumps({"failure": "x" * 100_000}).encode() + b'\n{"done": true}\n'
    sender = threading.Thread(
        target=lambda: (theirs.sendall(text[:50_000]), time.sleep(0.2), theirs.sendall(text[50_000:]))
    )
    sender.start()
    words = []
    while len(words) < 2:
        if (word := line.next()) is not None:
            words.append(word)
    sender.join()
    assert [list(word) for word in words] == [["failure"], ["done"]]
    theirs.close()
    line.close()


def test_a_host_that_no_longer_answers_is_given_up() -> None:
    # In a network of its own, whose loopback then drops every packet: no end of the connection is closed.
    program = (
        "import socket, subprocess, time\n"
        "from trainer.exchange import peers\n"
        "peers.PROBES = dict.fromkeys(peers.PROBES, 1)\n"
        "subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "other = socket.create_connection(server.getsockname())\n"
        "line = peers.Line(server.accept()[0])\n"
        "time.sleep(3)\n"
        "assert line.next() is None and line.broken is None, line.broken\n"
        "rules = 'table ip t { chain c { type filter hook input priority 0; policy drop; }; }'\n"
        "subprocess.run(['nft', '-f', '-'], input=rules, check=True, text=True)\n"
        "while line.next() is None and line.broken is None: time.sleep(0.1)\n"
        "print(line.broken)\n"
    )
    if os.geteuid() != 0 or not shutil.which("nft"):
        pytest.skip("needs root and nft, to take a network away")
    command = ["unshare", "--net", sys.executable, "-c", program]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, timeout=40)
    assert finished.stdout.strip() == "can't be reached any more: Connection timed out", finished.stderr
