"""Files come into a real container whole, however often who sends them is killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.lab import faults
from tests.lab.lab import Lab, wait_for
from tests.lab.user import Dflash

pytestmark = pytest.mark.lab


@contextlib.contextmanager
def slow_line(dflash: Dflash) -> Iterator[None]:
    """A way to the node that carries six megabytes a second: half-way is then a state that a test can meet."""
    host = dflash.inventory["hosts"]["node"]
    kind, key, *_ = (dflash.lab.ssh / "host_ed25519.pub").read_text().split()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (dflash.folder / "known").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
        dflash.inventory["hosts"]["node"] = {**host, "port": port, "known_hosts": str(dflash.folder / "known")}
        threading.Thread(target=serve, args=(server, host["port"]), daemon=True).start()
        try:
            yield
        finally:
            dflash.inventory["hosts"]["node"] = host
            server.shutdown(socket.SHUT_RDWR)


def serve(server: socket.socket, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            there, _ = server.accept()
            here = socket.create_connection(("127.0.0.1", port))
            for source, sink, rate in ((there, here, 6e6), (here, there, 1e9)):
                threading.Thread(target=carry, args=(source, sink, rate), daemon=True).start()


def carry(source: socket.socket, sink: socket.socket, rate: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
            time.sleep(len(data) / rate)
        sink.shutdown(socket.SHUT_WR)


def sha256(lab: Lab, path: str) -> str:
    return lab.container("sha256sum", path).stdout.split()[0]


def test_a_push_that_is_killed_half_way_goes_on_where_it_stopped(lab: Lab, dflash: Dflash) -> None:
    model = dflash.folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "weights.safetensors"
    weights.write_bytes(os.urandom(24 << 20))
    to = f"{dflash.root}/models"

    def came() -> int:
        command = f"cat {to}/*.partial/weights.safetensors | wc -c"
        return int(lab.container("sh", "-c", command, check=False).stdout)

    before = 0
    for how in (signal.SIGKILL, signal.SIGINT):
        with slow_line(dflash):
            pushing = dflash.start("push", str(model), "--to", to)
            wait_for("more of it has come", lambda: came() > before + (2 << 20), 60)  # noqa: B023
            pushing.send_signal(how)
            _, err = pushing.communicate(timeout=30)
        assert pushing.returncode in (-signal.SIGKILL, 130), err
        assert lab.container("ls", to).stdout.strip().endswith(".partial")
        before = came()
    assert "the same `dflash push` goes on" in err

    pushed = dflash.json("push", str(model), "--to", to)
    assert (pushed["kind"], pushed["files"]) == ("push", ["model/config.json", "model/weights.safetensors"])
    assert 0 < pushed["sent"] < 20 << 20
    assert lab.container("ls", to).stdout.split() == ["model"]
    assert sha256(lab, f"{to}/model/weights.safetensors") == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert lab.container("stat", "-c", "%a %U", f"{to}/model/weights.safetensors").stdout.split() == ["644", "root"]
    assert dflash.json("push", str(model), "--to", to)["sent"] == 0


def test_a_container_without_room_says_so_before_a_byte_is_sent(lab: Lab, dflash: Dflash) -> None:
    (dflash.folder / "large").write_bytes(bytes(8 << 20))
    with faults.small_disk(lab, dflash.root, 4):
        refused = dflash("push", str(dflash.folder / "large"), code=78)
        assert "8.0 MiB are to come" in refused.stderr
        assert lab.container("find", dflash.root, "-type", "f").stdout == ""
