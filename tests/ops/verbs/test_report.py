"""`dflash report` makes a page from a run or from pulled folders, and shows it live to this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.transport.base import Unreachable
from dflash_ops.verbs import report as verb
from dflash_ops.verbs.session import Session
from tests.ops.commands import dflash
from tests.ops.inprocess import InProcess
from tests.ops.show.report_runs import files, put

pytest.importorskip("matplotlib", reason="the extra `report` is not installed")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    for name, rate in (("first", 6e-4), ("second", 3e-4)):
        put(tmp_path / "root" / "runs" / name, files(rate, steps=30) | {"env": "export HF_TOKEN=canary"})
    return Session(None, "lab", InProcess(tmp_path / "root"), quiet=True)  # type: ignore[arg-type]


def test_runs_of_a_container_become_one_file_that_names_what_differs(session: Session, tmp_path: Path) -> None:
    answer = verb.report(session, ["first", "second"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert answer.runs == ("first", "second")
    assert answer.size == (tmp_path / "page.html").stat().st_size
    assert "<td>optimizer.lr</td><td>0.0006</td><td>0.0003</td>" in text
    assert "<td>gsm8k</td>" in text
    assert "canary" not in text


def test_a_pulled_folder_needs_no_container(tmp_path: Path) -> None:
    folder = put(tmp_path / "pulled", files(steps=30))
    answer = verb.report(None, [f"{folder}/"], tmp_path / "page.html")
    assert answer.runs == ("pulled",)
    assert any(line.startswith("GPU power") for line in answer.missing)


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    folder = put(tmp_path / "pulled", files(steps=3))
    with pytest.raises(ConfigurationError, match="holds no files of a run"):
        verb.report(None, [str(put(tmp_path / "other", {}))], None)
    with pytest.raises(ConfigurationError, match="cannot write"):
        verb.report(None, [str(folder)], tmp_path / "nowhere" / "page.html")
    with pytest.raises(UsageError, match="no container was named"):
        verb.report(None, ["first"], None)


def test_without_matplotlib_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path / "pulled", files(steps=3))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError) as caught:
        verb.report(None, [str(folder)], tmp_path / "page.html")
    assert "dflash-ops[report]" in caught.value.hint


def test_the_command_answers_with_one_document_and_needs_no_inventory_for_folders(tmp_path: Path) -> None:
    folder = put(tmp_path / "pulled", files(steps=3))
    done = dflash(tmp_path, "report", str(folder), "--to", str(tmp_path / "page.html"), "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["schema"], answer["kind"]) == (0, 1, "report")
    assert "Loss" in answer["plots"]
    assert dflash(tmp_path, "report", str(folder), "--serve", "--json").returncode == 2


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[verb.Live, int]]:
    folder = put(tmp_path / "pulled", files(steps=3))
    now = iter(range(0, 10**6, 60))
    made = verb.Live(None, [str(folder)], tmp_path / "kept", clock=lambda: float(next(now)))
    with verb.server(made, 0) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield made, listening.server_port
        listening.shutdown()
        thread.join()


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_live_page_is_made_anew_and_refreshes_itself(live: tuple[verb.Live, int], tmp_path: Path) -> None:
    assert "3 of 3" in ask(live[1])[1]
    put(tmp_path / "pulled", files(steps=5))
    code, text = ask(live[1])
    assert code == 200
    assert "5 of 5" in text
    assert 'http-equiv="refresh"' in text


def test_the_live_page_is_for_this_machine_and_for_reading_alone(live: tuple[verb.Live, int]) -> None:
    assert ask(live[1], Host="evil.example:80")[0] == 403
    assert ask(live[1], "/../../etc/passwd")[0] == 404
    assert ask(live[1], method="POST")[0] == 501


def test_a_browser_that_connects_and_asks_nothing_holds_nobody_up(live: tuple[verb.Live, int]) -> None:
    with socket.create_connection(("127.0.0.1", live[1])):
        assert ask(live[1])[0] == 200


def test_ctrl_c_ends_the_live_page_well(tmp_path: Path) -> None:
    folder = put(tmp_path / "pulled", files(steps=3))
    command = [sys.executable, "-m", "dflash_ops.main", "report", str(folder), "--serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())
        assert found
        assert ask(int(found[1]))[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_a_port_that_is_taken_is_named(live: tuple[verb.Live, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{live[1]}"):
        verb.server(live[0], live[1])


def test_the_live_page_samples_gpus_and_says_when_it_grows_old(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen:
        gpu: Any = verb.GpuDevices.model_validate(
            {"devices": [{"index": 0, "name": "H200", "utilization": 97, "power": 611.0}]}
        )
        verdict = type("", (), {"finished": False})
        roles = type("", (), {"all": [0]})
        now = type("", (), {"epoch": 1e9})

    monkeypatch.setattr(verb, "status", lambda *_: Seen)
    now = iter(range(0, 10**6, 60))
    page = verb.Live(session, ["first"], tmp_path / "kept", clock=lambda: float(next(now)))
    assert "<h3>GPU power</h3>" in page.text()

    def gone(*_: object) -> None:
        raise Unreachable("the host does not answer")

    monkeypatch.setattr(verb, "status", gone)
    assert "the host does not answer: this is older." in page.text()
