"""What is pushed is in its place whole and verified or not at all, however often the connection breaks."""

from __future__ import annotations

import json
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError, DflashError
from dflash_ops.progress import Progress
from dflash_ops.remote import push as remote_push
from dflash_ops.transport.base import BadAnswer, ConnectionLost, RemoteRefusal
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.transport.local import local_transport
from dflash_ops.verbs import push as push_verb
from dflash_ops.verbs import reconnect
from dflash_ops.verbs.push import Pushed, PushOptions, push
from dflash_ops.verbs.session import Session
from tests.ops.inprocess import InProcess


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like that of a model, hidden file and all; the container takes and tells of 1000 bytes at a time."""
    monkeypatch.setattr(reconnect.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(remote_push, "CHUNK", 1000)
    monkeypatch.setattr(remote_push, "_TOLD_EVERY", 1000)
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(os.urandom(7500))
    (folder / "sub" / "tokens é.json").write_text(json.dumps(list(range(300))))
    (folder / ".gitattributes").write_text("*.safetensors binary\n")
    (folder / "empty").write_bytes(b"")
    (folder / "weights.safetensors").chmod(0o600)
    return folder


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A folder of the container that everybody may read."""
    (tmp_path / "container").mkdir()
    (tmp_path / "container").chmod(0o755)
    return tmp_path / "container" / "data"


def send(there: Path, *files: Path, cuts: list[int] | None = None, meanwhile: Any = None, **options: Any) -> Pushed:
    session = Session(None, "lab", InProcess(there.parent / "root", cuts, meanwhile), quiet=True)  # type: ignore[arg-type]
    return push(session, PushOptions(files, str(there), **options), Progress())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_and_a_file_arrive_with_all_that_is_in_them(model: Path, there: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"a": 1}\n')
    answer = send(there, model, data)
    assert contents(there / "model") == contents(model)
    assert (there / "chats.jsonl").read_bytes() == data.read_bytes()
    assert sorted(path.name for path in there.iterdir()) == ["chats.jsonl", "model"]
    assert set(answer.files) == {f"model/{name}" for name in contents(model)} | {"chats.jsonl"}
    assert answer.sent == sum(map(len, contents(model).values())) + data.stat().st_size


def test_a_connection_that_breaks_after_each_frame_still_brings_everything(model: Path, there: Path) -> None:
    for cut in range(1, 14):
        to = there / f"cut-{cut}"
        send(to, model, cuts=[999, cut])  # the first connection looks
        assert contents(to / "model") == contents(model)
        assert [path.name for path in to.iterdir()] == ["model"]


def test_no_byte_travels_twice_over_a_connection_that_keeps_breaking(model: Path, there: Path) -> None:
    way = InProcess(there.parent / "root", [999, *([3, 999] * 30)])
    payloads: list[int] = []
    real = way._answer

    def answer(program: Any, request: dict[str, Any], payload: bytes) -> Any:
        payloads.append(len(payload))
        return real(program, request, payload)

    way._answer = answer  # type: ignore[method-assign]
    push(Session(None, "lab", way, quiet=True), PushOptions((model,), str(there)), Progress())  # type: ignore[arg-type]
    assert contents(there / "model") == contents(model)
    offered = [size for size in payloads if size]
    assert len(offered) > 3
    assert all(later < earlier for earlier, later in pairwise(offered))  # each goes on


def test_nothing_stands_under_its_name_until_all_of_it_is_there(model: Path, there: Path) -> None:
    def dies() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send(there, model, cuts=[999, 5], meanwhile={2: dies})
    assert [path.name.rpartition(".")[2] for path in there.iterdir()] == ["partial"]
    answer = send(there, model)
    assert answer.sent < sum(map(len, contents(model).values()))
    assert contents(there / "model") == contents(model)
    assert [path.name for path in there.iterdir()] == ["model"]


def test_what_is_there_with_the_same_contents_is_not_sent_again(model: Path, there: Path) -> None:
    send(there, model)
    answer = send(there, model)
    assert (answer.sent, answer.files) == (0, ())
    assert set(answer.kept) == {f"model/{name}" for name in contents(model)}


def test_other_contents_are_replaced_only_on_request(model: Path, there: Path) -> None:
    send(there, model)
    (there / "model" / "notes").write_text("of somebody else")
    (model / "sub" / "tokens é.json").write_text("[]")
    (model / "new").write_text("new")
    before = contents(there)
    with pytest.raises(DflashError, match=r"model/sub/tokens é.json is in the container already") as caught:
        send(there, model)
    assert (caught.value.code, "--replace" in caught.value.hint) == (2, True)
    assert contents(there) == before
    answer = send(there, model, replace=True)
    assert set(answer.files) == {"model/sub/tokens é.json", "model/new"}
    assert contents(there / "model") == {**contents(model), "notes": b"of somebody else"}


def test_what_came_of_an_older_version_is_removed_once_the_new_one_is_whole(model: Path, there: Path) -> None:
    weights = model / "weights.safetensors"

    def dies() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send(there, weights, cuts=[999, 3], meanwhile={2: dies})
    weights.write_bytes(os.urandom(500))
    send(there, weights)
    assert contents(there) == {"weights.safetensors": weights.read_bytes()}


@pytest.mark.parametrize("replaces", [False, True])
def test_files_are_as_readable_as_their_folder(model: Path, there: Path, replaces: bool) -> None:
    (model / "run.sh").write_text("#!/bin/sh\n")
    (model / "run.sh").chmod(0o700)
    if replaces:
        there.mkdir()
        (there / "model").mkdir()
        (there / "model/weights.safetensors").write_text("old")
        (there / "model/weights.safetensors").chmod(0o600)
    old = os.umask(0o077)
    try:
        send(there, model, replace=replaces)
    finally:
        os.umask(old)
    assert [mode(there), mode(there / "model"), mode(there / "model/sub")] == [0o755] * 3
    assert (mode(there / "model/weights.safetensors"), mode(there / "model/run.sh")) == (0o644, 0o755)


def test_what_comes_into_a_private_folder_stays_private(model: Path, there: Path) -> None:
    there.mkdir()
    (there).chmod(0o700)
    (model / "empty").chmod(0o644)
    send(there, model)
    assert (mode(there / "model"), mode(there / "model/empty")) == (0o700, 0o600)


def test_permissions_are_kept_on_request_and_otherwise_what_was_private_is_named(
    model: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send(there, model, keep_mode=True)
    assert mode(there / "model/weights.safetensors") == 0o600
    session = Session(None, "lab", InProcess(there.parent / "root"))  # type: ignore[arg-type]
    push(session, PushOptions((model,), str(there / "open")), Progress())
    assert "model/weights.safetensors: private here" in capsys.readouterr().err


def test_too_little_room_is_said_before_anything_is_sent(
    model: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = type("Room", (), {"f_bavail": 2, "f_frsize": 1024})()
    monkeypatch.setattr(remote_push.os, "statvfs", lambda path: room)
    with pytest.raises(ConfigurationError, match=r"are to come and .*container has room for 2.0 KiB"):
        send(there, model)
    assert not there.exists()


def test_a_file_that_never_matches_its_hash_is_never_put_in_place(
    model: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = push_verb._Sender._payload
    monkeypatch.setattr(push_verb._Sender, "_payload", lambda self: (b"\0" * len(piece) for piece in real(self)))
    with pytest.raises(DflashError, match=r"weights.safetensors does not match its hash") as caught:
        send(there, model / "weights.safetensors")
    assert caught.value.code == 75
    assert contents(there) == {}


def test_a_file_that_arrives_changed_once_is_sent_anew(
    model: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = push_verb._Sender._payload
    times: list[int] = []

    def payload(sender: Any) -> Any:
        times.append(1)
        return (b"\0" * len(piece) if len(times) == 1 else piece for piece in real(sender))

    monkeypatch.setattr(push_verb._Sender, "_payload", payload)
    send(there, model)
    assert contents(there / "model") == contents(model)


def test_a_file_that_changes_while_it_is_pushed_is_named(
    model: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewritten() -> None:
        (model / "weights.safetensors").write_bytes(os.urandom(7500))

    with pytest.raises(ConfigurationError, match=r"weights.safetensors changes while it is pushed"):
        send(there, model, meanwhile={0: rewritten})  # after its hash was taken
    assert not (there / "model").exists()


def test_a_file_that_is_gone_or_shorter_when_it_is_sent_is_named(model: Path, there: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*weights.safetensors any more: No such file"):
        send(there, model, meanwhile={0: (model / "weights.safetensors").unlink})
    (model / "weights.safetensors").write_bytes(b"x" * 7500)
    with pytest.raises(ConfigurationError, match=r"weights.safetensors changes while it is pushed"):
        send(there, model, meanwhile={0: lambda: (model / "weights.safetensors").write_bytes(b"x")})
    assert not (there / "model").exists()


def refuse_link(folder: Path) -> Path:
    (folder / "other").symlink_to(folder / "sub")
    return folder


def refuse_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder


def refuse_escape(folder: Path) -> Path:
    (folder / "a\x1b[2J").write_text("")
    return folder


def refuse_bytes(folder: Path) -> Path:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).write_text("")
    return folder


def refuse_long(folder: Path) -> Path:
    (folder / ("n" * 230)).write_text("")
    return folder


def refuse_empty(folder: Path) -> Path:
    (folder / "nothing").mkdir()
    return folder / "nothing"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (refuse_link, "is a link to a folder"),
        (refuse_fifo, "is neither a file nor a folder"),
        (refuse_escape, "letters that cannot be shown"),
        (refuse_bytes, "letters that cannot be shown"),
        (refuse_long, "is longer than 220 bytes"),
        (refuse_empty, "there is no file in the folder nothing"),
        (lambda folder: folder / "absent", "cannot read .*absent: No such file"),
    ],
)
def test_what_cannot_be_pushed_is_named_before_anything_is_asked(model: Path, prepare: Any, words: str) -> None:
    session = Session(None, "lab", FakeTransport({}), quiet=True)  # type: ignore[arg-type]
    with pytest.raises(DflashError, match=words) as caught:
        push(session, PushOptions((prepare(model),), "/data"), Progress())
    assert caught.value.code == 2


def test_two_files_of_one_name_are_refused(model: Path, there: Path) -> None:
    with pytest.raises(DflashError, match="two of the files are named empty"):
        send(there, model / "empty", model / "empty")


def test_a_link_to_a_file_stands_for_the_file(model: Path, there: Path) -> None:
    (model / "linked").symlink_to("weights.safetensors")  # as the cache of a model hub has it
    send(there, model)
    assert not (there / "model/linked").is_symlink()
    assert (there / "model/linked").read_bytes() == (model / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("to", ["data", "/data/../etc", "", "/da\nta"])
def test_a_folder_that_is_no_whole_path_is_refused(model: Path, to: str) -> None:
    session = Session(None, "lab", FakeTransport({}), quiet=True)  # type: ignore[arg-type]
    with pytest.raises(DflashError, match="is no folder of a container") as caught:
        push(session, PushOptions((model,), to), Progress())
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("to", "name"), [("runs", "a"), ("releases/x", "a"), ("env", "a"), ("wheels", "a"), ("", "runs"), (".//runs/", "a")]
)
def test_what_dflash_keeps_is_not_pushed_into(tmp_path: Path, to: str, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text("x")
    root = tmp_path / "root"
    session = Session(None, "lab", InProcess(root), str(root), quiet=True)  # type: ignore[arg-type]
    with pytest.raises(RemoteRefusal, match="is dflash's own") as caught:
        push(session, PushOptions((tmp_path / name,), str(root / to)), Progress())
    assert (caught.value.code, root.exists()) == (2, False)


def test_a_link_into_what_dflash_keeps_is_no_way_around(model: Path, there: Path) -> None:
    root = there.parent / "root"
    (root / "releases").mkdir(parents=True)
    there.symlink_to(root / "releases")
    with pytest.raises(RemoteRefusal, match="is dflash's own"):
        send(there, model)


def test_without_to_it_comes_to_data_below_the_root(model: Path, tmp_path: Path) -> None:
    session = Session(None, "lab", InProcess(tmp_path / "root"), str(tmp_path / "root"), quiet=True)  # type: ignore[arg-type]
    push(session, PushOptions((model,)), Progress())
    assert contents(tmp_path / "root/data/model") == contents(model)


def test_a_file_in_place_of_a_folder_is_never_replaced(model: Path, there: Path) -> None:
    there.mkdir()
    (there / "model").write_text("a file")
    with pytest.raises(RemoteRefusal, match="is a file there and a folder here"):
        send(there, model, replace=True)
    with pytest.raises(RemoteRefusal, match="is not a folder"):
        send(there / "model", model)


@pytest.mark.parametrize(
    ("unit", "path"), [("..", "a"), ("", "a"), ("a/b", "a"), ("a", "../x"), ("a", "b//c"), ("a", "/etc"), ("a", "")]
)
def test_the_container_refuses_a_name_that_leads_elsewhere(there: Path, unit: str, path: str) -> None:
    files = [{"path": path, "size": 0, "sha256": "0" * 64, "executable": False, "mode": None}]
    unit_ = {"name": unit, "folder": True, "sha256": "0" * 64, "files": files}
    request = {"root": "/root-folder", "to": str(there), "do": "look", "units": [unit_]}
    with pytest.raises(remote_push.Refusal, match="nothing can be stored"):
        remote_push.main(request, None)  # type: ignore[arg-type]


def test_a_link_planted_in_place_of_the_partial_file_is_not_followed(model: Path, there: Path) -> None:
    weights = model / "weights.safetensors"
    there.mkdir()
    (there.parent / "victim").write_text("keep")
    digest = push_verb._units((weights,), Progress())[0].described(False)["sha256"]
    (there / f"weights.safetensors.{digest[:16]}.partial").symlink_to(there.parent / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        send(there, weights)
    assert (there.parent / "victim").read_text() == "keep"


def test_two_pushes_of_the_same_file_do_not_write_into_each_other(
    model: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_push, "_LOCK_SECONDS", 0.0)
    monkeypatch.setattr(remote_push, "_locked", lambda handle: False)
    with pytest.raises(RemoteRefusal, match="another push writes") as caught:
        send(there, model)
    assert caught.value.code == 75


@pytest.mark.parametrize(
    "answers",
    [
        [{"files": [], "free": 9, "where": "/"}],
        [{"files": [["missing", 99]], "free": 9, "where": "/"}],
        [{"files": [["missing", -1]], "free": 9, "where": "/"}],
        [{"files": "x"}],
        [{"files": [["missing", 0]], "free": 9, "where": "/"}, [{"at": 99}, {"wrong": []}]],
        [{"files": [["missing", 0]], "free": 9, "where": "/"}, [{"at": -1}, {"wrong": []}]],
        [{"files": [["missing", 0]], "free": 9, "where": "/"}, [{"surprise": 1}, {"wrong": []}]],
    ],
)
def test_a_container_that_answers_for_something_else_is_refused(tmp_path: Path, answers: list[Any]) -> None:
    (tmp_path / "file").write_text("12345")
    session = Session(None, "lab", FakeTransport({"push": answers}), quiet=True)  # type: ignore[arg-type]
    with pytest.raises(BadAnswer):
        push(session, PushOptions((tmp_path / "file",), "/data"), Progress())


def test_over_a_real_pipe_several_megabytes_arrive(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(5 << 20))
    (tmp_path / "small").write_text("x")
    session = Session(None, "here", local_transport(), str(tmp_path / "root"), quiet=True)  # type: ignore[arg-type]
    answer = push(session, PushOptions((tmp_path / "big", tmp_path / "small")), Progress())
    assert answer.sent == (5 << 20) + 1
    assert (tmp_path / "root/data/big").read_bytes() == (tmp_path / "big").read_bytes()


def test_a_connection_that_breaks_before_anything_was_asked_is_not_waited_out(model: Path) -> None:
    session = Session(None, "lab", FakeTransport({"push": [ConnectionLost("broke")]}), quiet=True)  # type: ignore[arg-type]
    with pytest.raises(ConnectionLost):
        push(session, PushOptions((model,), "/data"), Progress())
