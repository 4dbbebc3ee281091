"""What no run uses may go; what a run uses, or may be about to use, stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.inventory.models import Inventory
from dflash_ops.transport.local import local_transport
from dflash_ops.verbs.gc import GcOptions, GcReport, look, remove
from dflash_ops.verbs.session import Session

DAY = 86400


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """With a systemctl that knows the units in the file `units`, as active."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (tmp_path / "units").write_text("")
    script = binaries / "systemctl"
    script.write_text(
        '#!/bin/sh\nfor unit; do case $unit in *.service) echo "Id=$unit"; '
        f'if grep -qx "$unit" {tmp_path}/units; then echo LoadState=loaded; echo ActiveState=active; '
        "else echo LoadState=not-found; echo ActiveState=inactive; fi; echo;; esac; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    inventory = Inventory.model_validate({"path": tmp_path / "i.yaml", "containers": {"here": {"host": "local"}}})
    return Session(inventory, "here", local_transport(), str(tmp_path / "root"), quiet=True)


def age_of(path: Path, days: float) -> None:
    for entry in [path, *path.rglob("*")]:
        os.utime(entry, (time.time() - days * DAY,) * 2)


def make_run(session: Session, name: str, days: float, *, ended: bool = True, **spec: Any) -> None:
    run = Path(session.root, "runs", name)
    run.mkdir(parents=True)
    (run / "spec.json").write_text(json.dumps({"release": "0" * 32, **spec}))
    if ended:
        (run / "exit.json").write_text("{}")
    age_of(run, days)


def make_folder(session: Session, path: str, days: float = 30) -> None:
    folder = Path(session.root, path)
    folder.mkdir(parents=True)
    (folder / "file").write_text("x" * 10_000)
    age_of(folder, days)


def make_cache(session: Session, name: str, days: float = 30) -> str:
    """A compile cache whose kernels are old and whose key was last written `days` ago."""
    make_folder(session, f"cache/compile/{name}", 90)
    key = Path(session.root, "cache/compile", name, "key.json")
    key.write_text(json.dumps({"torch": "2.13.0", "gpu": "NVIDIA H200", "shapes": {}}))
    age_of(key, days)
    return str(key.parent)


def found(report: GcReport, session: Session) -> set[str]:
    return {os.path.relpath(item.path, session.root) for item in report.items}


def test_old_ended_runs_may_go_but_the_newest_stay(session: Session) -> None:
    for index in range(5):
        make_run(session, f"r{index}", days=30 - index)
    assert found(look(session, GcOptions(keep=2, older_than=14)), session) == {"runs/r0", "runs/r1", "runs/r2"}
    assert found(look(session, GcOptions(keep=0, older_than=28)), session) == {"runs/r0", "runs/r1", "runs/r2"}
    assert found(look(session, GcOptions(keep=10, older_than=0)), session) == set()


def test_a_live_run_stays_whatever_its_age_and_so_does_all_that_it_uses(session: Session, tmp_path: Path) -> None:
    make_run(session, "source", 90, release="1" * 32)
    resumed = str(Path(session.root, "runs/source"))
    make_run(session, "live", 60, ended=False, release="2" * 32, lock="3" * 32, resumed_from=resumed)
    for path in (f"releases/{'1' * 32}", f"releases/{'2' * 32}", f"env/{'3' * 32}", f"releases/{'4' * 32}"):
        make_folder(session, path)
    make_cache(session, "k1")
    make_folder(session, "cache/uv")
    (tmp_path / "units").write_text("dflash-live.service\n")
    assert found(look(session, GcOptions(keep=0, older_than=0, caches=True)), session) == {f"releases/{'4' * 32}"}
    (tmp_path / "units").write_text("")
    everything = found(look(session, GcOptions(keep=0, older_than=0, caches=True)), session)
    assert {"runs/live", "runs/source", f"releases/{'2' * 32}", f"env/{'3' * 32}", "cache/uv"} <= everything
    assert "cache/compile/k1" in everything


def test_compile_caches_go_one_by_one_when_no_run_took_them_up_for_long(session: Session) -> None:
    old, recent = make_cache(session, "old", 20), make_cache(session, "recent", 3)
    report = look(session, GcOptions(older_than=14))
    assert [(item.path, item.kind, item.why) for item in report.items] == [
        (old, "cache", "torch 2.13.0 on NVIDIA H200, last used 20 days ago")
    ]
    assert report.bytes >= 10_000
    assert found(look(session, GcOptions(caches=True)), session) == {"cache/compile/old", "cache/compile/recent"}
    assert remove(session, GcOptions(older_than=14), report).removed == [old]
    assert [str(path) for path in Path(session.root, "cache/compile").iterdir()] == [recent]


def test_a_compile_cache_of_a_live_run_stays_and_all_do_while_one_has_yet_to_compile(
    session: Session, tmp_path: Path
) -> None:
    used, _ = make_cache(session, "used"), make_cache(session, "unused")
    make_run(session, "live", 60, ended=False)
    (tmp_path / "units").write_text("dflash-live.service\n")
    compiled = Path(session.root, "runs/live/compile.json")
    for text in (None, "", "{", "3", "[3]"):
        if text is not None:
            compiled.write_text(text)
        assert found(look(session, GcOptions(caches=True)), session) == set()
    compiled.write_text(json.dumps([{"worker": "drafter 0", "cache_directory": used, "cache_bytes": 9}]))
    assert found(look(session, GcOptions()), session) == {"cache/compile/unused"}
    assert found(look(session, GcOptions(caches=True)), session) == {"cache/compile/unused"}


def test_a_compile_cache_that_a_run_took_up_meanwhile_stays(session: Session) -> None:
    path = make_cache(session, "k1")
    agreed = look(session, GcOptions())
    os.utime(Path(path, "key.json"))
    assert remove(session, GcOptions(), agreed).removed == []
    assert Path(path, "file").is_file()


def test_what_a_launch_may_just_have_sent_stays(session: Session) -> None:
    make_folder(session, f"releases/{'1' * 32}", days=0)
    make_folder(session, f"releases/{'2' * 32}.tmp-1", days=0)
    make_folder(session, f"wheels/{'3' * 32}", days=0)
    make_folder(session, f"releases/{'4' * 32}.tmp-1")
    make_folder(session, f"releases/{'5' * 32}.damaged-1")
    assert found(look(session, GcOptions()), session) == {
        f"releases/{'4' * 32}.tmp-1",
        f"releases/{'5' * 32}.damaged-1",
    }


def test_looking_removes_nothing(session: Session) -> None:
    make_run(session, "r0", 30)
    make_folder(session, f"releases/{'1' * 32}")
    before = sorted(Path(session.root).rglob("*"))
    assert look(session, GcOptions(keep=0)).bytes >= 10_000
    assert sorted(Path(session.root).rglob("*")) == before


def test_only_what_was_agreed_to_is_removed(session: Session) -> None:
    make_run(session, "r0", 30)
    agreed = look(session, GcOptions(keep=0))
    make_run(session, "r1", 30)
    report = remove(session, GcOptions(keep=0), agreed)
    assert report.removed == [str(Path(session.root, "runs/r0"))]
    assert [path.name for path in Path(session.root, "runs").iterdir()] == ["r1"]


def test_what_a_run_began_to_use_meanwhile_stays(session: Session) -> None:
    make_folder(session, f"releases/{'1' * 32}")
    agreed = look(session, GcOptions())
    make_run(session, "new", 0, release="1" * 32)
    assert remove(session, GcOptions(), agreed).removed == []
    assert Path(session.root, "releases", "1" * 32).is_dir()


def test_paths_that_were_not_found_are_never_removed(session: Session, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    asked = {
        "root": session.root,
        "keep": 0,
        "older_than": 0,
        "caches": True,
        "remove": [str(precious), "/", session.root],
    }
    frames = list(session.stream("gc", asked))
    assert frames[-1].value == {"items": [], "removed": []}
    assert precious.is_dir()


def test_a_removal_that_was_cut_off_is_finished_by_the_next(session: Session) -> None:
    make_folder(session, "runs/.gone-1-r0", days=0)
    make_folder(session, "cache/compile/.gone-1-k1", days=0)
    report = look(session, GcOptions())
    assert found(report, session) == {"runs/.gone-1-r0", "cache/compile/.gone-1-k1"}
    assert remove(session, GcOptions(), report).removed
    assert list(Path(session.root, "runs").iterdir()) == []


def test_when_systemd_does_not_answer_nothing_may_go(session: Session, tmp_path: Path) -> None:
    from dflash_ops.errors import DflashError

    make_run(session, "r0", 30, ended=False)
    (tmp_path / "bin/systemctl").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    with pytest.raises(DflashError, match="systemd in the container did not answer"):
        look(session, GcOptions(keep=0, older_than=0))
