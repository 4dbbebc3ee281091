"""How the processes of a run meet, and what they hear of each other's end."""

from __future__ import annotations

import json
import os
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
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainer.pipeline import peers
from trainer.pipeline.peers import PeerError, Peers

pytestmark = pytest.mark.timeout(60)
HOST = socket.gethostname()
LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def port_and_token(store: Any) -> dict[str, Any]:
    return dict(json.loads(store.get(peers._MEETING_KEY)))


@contextmanager
def met(count: int) -> Iterator[list[Peers]]:
    """What each of so many processes, played by threads, holds after they have met."""
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda n: Peers.meet(store, n, count, {"n": n}, LONG), range(count)))
    assert [everyone for _, everyone in found] == [[{"n": n} for n in range(count)]] * count
    yield [peer for peer, _ in found]
    for peer, _ in found:
        peer.close()


def heard(peer: Peers) -> str:
    while (failure := peer.failure()) is None:
        time.sleep(0.01)
    return failure


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
        zero = pool.submit(Peers.meet, store, 0, 2, {}, LONG)
        port = port_and_token(store)["port"]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
        strangers[1].sendall(b'{"token": "guessed", "process": 1, "host": "x", "setup": {}}\n[1]\n')
        strangers[2].close()
        one = pool.submit(Peers.meet, store, 1, 2, {}, LONG)
        met = [future.result(30)[0] for future in (zero, one)]
    assert [peer.failure() for peer in met] == [None, None]
    for peer in met:
        peer.close()
    for stranger in strangers:
        stranger.close()


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(PeerError, match=r"^process 1, 2 did not come$"):
        Peers.meet(HashStore(), 0, 3, {}, timedelta(seconds=0.1))


def test_one_that_dies_while_others_are_awaited_ends_the_waiting_of_all() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[Any]] = [pool.submit(Peers.meet, store, number, 4, {}, LONG) for number in (0, 1)]
        meeting = port_and_token(store)
        with socket.create_connection(("127.0.0.1", meeting["port"])) as dying:
            hello = {"token": meeting["token"], "process": 2, "host": "there", "setup": {}}
            dying.sendall(json.dumps(hello).encode() + b"\n")
        with pytest.raises(PeerError, match=r"^process 2 on there died without a word$"):
            waiting[0].result(10)
        # It hears why, if it had introduced itself by then.
        with pytest.raises(PeerError, match=r"^process (2 on there died|0 on 127.0.0.1 ended)"):
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
        "from trainer.pipeline import peers\n"
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
