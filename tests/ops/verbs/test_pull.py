"""What a run made comes whole or not at all, however often the connection breaks."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError, DflashError
from dflash_ops.remote import pull as remote_pull
from dflash_ops.remote.files import fsync_directory
from dflash_ops.transport.base import BadAnswer, ConnectionLost
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs import reconnect as live
from dflash_ops.verbs.pull import Progress, Pulled, PullOptions, What, pull
from dflash_ops.verbs.session import Session
from tests.ops.inprocess import InProcess


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory with two checkpoints, a log, metrics and a secret."""
    monkeypatch.setattr(live.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(remote_pull, "CHUNK", 1000)
    folder = tmp_path / "root" / "runs" / "r1"
    for step in (10, 20):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights.safetensors").write_bytes(os.urandom(3500))
        (checkpoint / "manifest.json").write_text(json.dumps({"step": step}))
    unfinished = folder / "checkpoints" / "step-00000030.tmp"
    unfinished.mkdir()
    (unfinished / "weights.safetensors").write_bytes(b"half")
    (folder / "log").write_text("line\n" * 900)
    (folder / "metrics.jsonl").write_text('{"kind": "step"}\n' * 100)
    (folder / "env").write_text("export HF_TOKEN='canary'\n")
    (folder / "spec.json").write_text("{}")
    return folder


def bring(run: Path, to: Path, what: What = "all", cuts: list[int] | None = None, **options: Any) -> Pulled:
    session = Session(None, "lab", InProcess(run.parents[1], cuts, **options), quiet=True)  # type: ignore[arg-type]
    return pull(session, PullOptions("r1", what, to), Progress())


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def wanted(run: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(run).items() if name != "env" and ".tmp" not in name}


def test_everything_comes_but_the_secrets_and_what_is_not_finished(run: Path, tmp_path: Path) -> None:
    answer = bring(run, tmp_path / "here")
    assert contents(tmp_path / "here" / "r1") == wanted(run)
    assert set(answer.files) == set(wanted(run))


def test_a_connection_that_breaks_after_each_frame_still_brings_everything(run: Path, tmp_path: Path) -> None:
    frames = 60
    for cut in range(1, frames):
        to = tmp_path / f"cut-{cut}"
        bring(run, to, cuts=[cut])
        assert contents(to / "r1") == wanted(run)


def test_a_connection_that_keeps_breaking_makes_progress_each_time(run: Path, tmp_path: Path) -> None:
    answer = bring(run, tmp_path / "here", cuts=[5] * 30)
    assert contents(tmp_path / "here" / "r1") == wanted(run)
    sizes = sum((run / name).stat().st_size for name in wanted(run))
    assert answer.received == sizes  # no byte travelled twice


def test_a_pull_that_was_killed_is_taken_up_by_the_next(run: Path, tmp_path: Path) -> None:
    def dies() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring(run, tmp_path / "here", "checkpoints", cuts=[9], meanwhile={1: dies})
    assert not (tmp_path / "here" / "r1" / "checkpoints" / "step-00000020").exists()
    answer = bring(run, tmp_path / "here", "checkpoints")
    assert answer.received < 2 * 3500
    assert (tmp_path / "here/r1/checkpoints/step-00000020/weights.safetensors").read_bytes() == (
        run / "checkpoints/step-00000020/weights.safetensors"
    ).read_bytes()


def test_what_is_here_is_not_sent_again(run: Path, tmp_path: Path) -> None:
    bring(run, tmp_path / "here", "checkpoints")
    answer = bring(run, tmp_path / "here", "checkpoints")
    assert (answer.received, answer.files) == (0, ())
    assert answer.kept == ("step-00000010", "step-00000020")


def test_a_log_that_grew_sends_only_its_new_end(run: Path, tmp_path: Path) -> None:
    bring(run, tmp_path / "here", "log")
    with (run / "log").open("a") as stream:
        stream.write("more\n")
    answer = bring(run, tmp_path / "here", "log")
    assert answer.received == 5
    assert (tmp_path / "here/r1/log").read_bytes() == (run / "log").read_bytes()


def test_a_log_that_became_another_one_is_fetched_anew(run: Path, tmp_path: Path) -> None:
    bring(run, tmp_path / "here", "log")
    (run / "log").write_text("quite different\n" * 900)
    bring(run, tmp_path / "here", "log")
    assert (tmp_path / "here/r1/log").read_bytes() == (run / "log").read_bytes()


def test_a_checkpoint_of_another_life_under_the_same_name_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    bring(run, tmp_path / "here", "checkpoints")
    (run / "checkpoints/step-00000020/manifest.json").write_text('{"step": 20, "other": true}')
    with pytest.raises(ConfigurationError, match="differs"):
        bring(run, tmp_path / "here", "checkpoints")


def test_a_checkpoint_that_the_trainer_deletes_meanwhile_is_reported_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = remote_pull._send

    def send(paths: Any, path: str, *rest: Any) -> None:
        if path.endswith("step-00000010/weights.safetensors"):
            (run / path).unlink()
        real(paths, path, *rest)

    monkeypatch.setattr(remote_pull, "_send", send)
    answer = bring(run, tmp_path / "here", "checkpoints")
    assert answer.vanished == ("step-00000010",)
    assert [path.name for path in (tmp_path / "here/r1/checkpoints").iterdir()] == ["step-00000020"]


def test_links_are_not_followed_out_of_the_run(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints/step-00000020/escape").symlink_to("/etc/passwd")
    (run / "passwd").symlink_to("/etc/passwd")
    answer = bring(run, tmp_path / "here")
    assert not any("passwd" in path or "escape" in path for path in answer.files)


def test_no_room_here_is_said_before_anything_is_sent(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(ConfigurationError, match="room"):
        bring(run, tmp_path / "here")
    assert list((tmp_path / "here" / "r1").iterdir()) == []


def hostile(tmp_path: Path, events: list[dict[str, Any]]) -> Pulled:
    transport = FakeTransport({"pull": [[{"run": "r1"}, *events, {}], ConnectionLost("over")]})
    session = Session(None, "lab", transport, quiet=True)  # type: ignore[arg-type]
    return pull(session, PullOptions("r1", "all", tmp_path / "here"), Progress())


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a//b", ".hidden", "x\x1b[2J", "", "a/ b"])
def test_a_path_that_could_leave_the_folder_is_left_out(tmp_path: Path, path: str) -> None:
    events = [
        {"plan": [[path, 1]], "kept": []},
        {"begin": path, "offset": 0},
        {"data": b"x", "size": 1, "packed": False},
        {"end": path, "sha256": hashlib.sha256(b"x").hexdigest(), "size": 1},
    ]
    answer = hostile(tmp_path, events)
    assert (answer.files, len(answer.refused)) == ((), 1)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "event",
    [
        {"data": b"xxx", "size": 3, "packed": False},  # more than the plan says
        {"data": b"!", "size": 2, "packed": False},
        {"data": b"x", "size": 1, "packed": True},
        {"data": "x", "size": 1, "packed": False},
        {"end": "other", "sha256": "x", "size": 1},
        {"surprise": 1},
        {"begin": "log", "offset": -1},
    ],
)
def test_a_remote_that_breaks_its_own_plan_is_refused(tmp_path: Path, event: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        hostile(tmp_path, [{"plan": [["log", 1]], "kept": []}, {"begin": "log", "offset": 0}, event])


def test_a_folder_that_cannot_hold_files_is_a_sentence(run: Path, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a file")
    with pytest.raises(ConfigurationError, match=f"cannot keep files here: .* .*{tmp_path}/here"):
        bring(run, tmp_path / "here")


def test_a_file_that_never_matches_its_hash_is_never_put_in_place(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pull.hashlib, "sha256", lambda data=b"": hashlib.md5(data))
    with pytest.raises(DflashError, match="does not match"):
        bring(run, tmp_path / "here", "log")
    assert not (tmp_path / "here/r1/log").exists()


@pytest.mark.parametrize(
    ("unit", "what", "code", "words"),
    [
        ({"LoadState": "not-found"}, "checkpoints", 78, "the run r1 has ended and left no checkpoint"),
        ({"LoadState": "loaded", "ActiveState": "active"}, "checkpoints", 75, "the run r1 has no checkpoint yet"),
        ({"LoadState": "loaded", "ActiveState": "active"}, "metrics", 75, "the run r1 has no metrics yet"),
    ],
)
def test_nothing_to_bring_is_said_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: dict[str, str], what: What, code: int, words: str
) -> None:
    monkeypatch.setattr(remote_pull.systemd, "show_units", lambda units: {units[0]: unit})
    run = tmp_path / "root" / "runs" / "r1"
    run.mkdir(parents=True)
    with pytest.raises(DflashError, match=words) as caught:
        bring(run, tmp_path / "here", what)
    assert caught.value.code == code
    assert "r1" in caught.value.hint
    assert not (tmp_path / "here").exists()


def test_a_folder_that_cannot_be_flushed_is_written_to_all_the_same() -> None:
    with pytest.raises(OSError, match="Invalid argument"):  # else /proc stands for no such file system
        os.fsync(os.open("/proc", os.O_RDONLY))
    fsync_directory("/proc")
