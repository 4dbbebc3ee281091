"""Locked environments are built whole or not at all, beside the others, with or without network."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError, DflashError, UsageError
from dflash_ops.plan.interpreter import interpreter
from dflash_ops.show.answers import show_env_list
from dflash_ops.verbs.env import build, listing, platform_tags, uses
from dflash_ops.verbs.session import Session
from tests.ops.locked import UV

needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed here")


def names(session: Session, folder: str) -> list[str]:
    path = Path(session.root, folder)
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")) if path.exists() else []


def test_an_environment_that_names_an_interpreter_cannot_be_built(session: Session) -> None:
    with pytest.raises(UsageError, match="nothing to build"):
        build(session, "there")


@needs_uv
def test_built_offline_it_works_is_listed_and_is_never_built_twice(session: Session) -> None:
    report = build(session, "locked", offline=True)
    assert report.state == "built"
    code = "import tiny_thing, sys; print(tiny_thing.value, sys.prefix)"
    done = subprocess.run([report.path, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["42", str(Path(report.path).parents[1])]
    before = sorted((path, path.lstat().st_mtime_ns) for path in Path(report.path).parents[1].rglob("*"))
    assert build(session, "locked").state == "present"
    assert sorted((path, path.lstat().st_mtime_ns) for path in Path(report.path).parents[1].rglob("*")) == before
    assert names(session, "env") == [report.lock]
    assert names(session, "wheels") == []

    run = Path(session.root, "runs/r1")
    run.mkdir(parents=True)
    (run / "spec.json").write_text(json.dumps({"lock": report.lock}))
    listed = listing(session)
    assert [(entry.lock, entry.environments, entry.packages, entry.runs) for entry in listed.built] == [
        (report.lock, ["locked"], 1, ["r1"])
    ]
    assert listed.not_built == ["bad"]
    assert uses(listed, "locked").runs == uses(listed, report.lock[:8]).runs == ["r1"]
    assert uses(listed, "bad").runs == []
    with pytest.raises(UsageError, match="no environment 'other'") as caught:
        uses(listed, "other")
    assert caught.value.hint == "known: bad, locked, there"


@needs_uv
def test_a_failed_build_leaves_nothing_that_looks_finished(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", "")
    with pytest.raises(DflashError) as caught:
        build(session, "bad")
    assert "uv failed, and nothing was kept" in caught.value.message
    assert "\n" not in caught.value.message
    assert names(session, "env") == []


def test_wheels_that_cannot_be_had_are_named_before_anything_is_sent(session: Session) -> None:
    with pytest.raises(ConfigurationError, match="no-such-thing"):
        build(session, "bad", offline=True)
    assert names(session, "wheels") == names(session, "env") == []


@needs_uv
def test_what_a_killed_build_left_is_cleared_by_the_next(session: Session) -> None:
    lock = interpreter(session.inventory, "locked", session.paths).lock
    left = Path(session.root, "env", f"{lock}.tmp-1")
    (left / "bin").mkdir(parents=True)
    build(session, "locked", offline=True)
    assert names(session, "env") == [lock]


def test_platform_tags_run_from_the_container_s_glibc_down() -> None:
    tags = platform_tags("x86_64", "2.31")
    assert tags[0] == "manylinux_2_31_x86_64"
    assert "manylinux_2_32_x86_64" not in tags
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)
    assert platform_tags("aarch64", None)[0] == "musllinux_1_2_aarch64"
    assert any("aarch64" in tag for tag in platform_tags("aarch64", "odd"))


def request(session: Session, **changes: Any) -> dict[str, Any]:
    found = interpreter(session.inventory, "locked", session.paths)
    given = {"root": session.root, "do": "build", "name": "x", "lock": found.lock, "text": "", "python": "3"}
    return {**given, "wheels": None, **changes}


@pytest.mark.parametrize("lock", ["../../etc", "a" * 31, "", "A" * 32])
def test_an_environment_can_only_be_named_by_a_hash(session: Session, lock: str) -> None:
    with pytest.raises(DflashError, match="not the hash"):
        list(session.stream("env", request(session, lock=lock)))


def test_an_interpreter_s_runs_are_listed_and_every_line_says_what_it_is(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, spec in (("r1", {"python": "/opt/venv/bin/python"}), ("r2", {"python": "/other", "lock": None})):
        run = Path(session.root, "runs", name)
        run.mkdir(parents=True)
        (run / "spec.json").write_text(json.dumps(spec))
    listed = listing(session)
    assert uses(listed, "there").runs == ["r1"]
    show_env_list(listed)
    lines = capsys.readouterr().out.splitlines()
    assert "interpreter   there: /opt/venv/bin/python, 1 run" in lines
    assert "not built     locked: `dflash env build locked` builds it" in lines
