"""`dflash diff` finds each change and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.verbs.diff import compare_code, compare_facts, compare_specs, diff, flat
from dflash_ops.verbs.session import Session
from tests.ops.evidence import spec
from tests.ops.inprocess import InProcess
from tests.ops.kept_facts import FIXTURES, GREW, given


def test_two_times_the_same_facts_do_not_differ_even_when_load_and_free_memory_do() -> None:
    later = given(time=1.0, system__memory_available=7, disk__root__free=9, boot_id="other")
    assert list(compare_facts(given(), later)) == []


@pytest.mark.parametrize(
    ("change", "section", "key"),
    [
        ({"packages__torch": "2.12.0"}, "packages", "torch"),
        ({"driver__kernel": "570.1"}, "driver", "kernel module"),
        ({"driver__library": None}, "driver", "libnvidia-ml"),
        ({"torch__files__state": "changed"}, "torch", "files"),
        ({"python__version": "3.12.1"}, "environment", "interpreter"),
        ({"gpu__command": {"state": "missing"}}, "gpus", "GPUs"),
        ({"compile_cache__files": 0}, "cache", "state"),
        ({"compile_cache__keys": {}}, "cache", "key 5f2c"),
        ({"compile_cache__keys": {"5f2c": GREW, "c1d3": GREW}}, "cache", "key c1d3"),
        ({"system__kernel": "6.9"}, "system", "kernel"),
        ({"limits": {"open files": ["1024", "99"]}}, "system", "limit open files"),
        ({"hooks": [{"file": "/x.pth", "what": "pth", "sha256": "ab"}]}, "environment", "start-up hook /x.pth"),
        ({"manager_variables": ["LANG"]}, "environment", "systemd's variables"),
    ],
)
def test_each_change_is_found_and_nothing_else(change: dict[str, Any], section: str, key: str) -> None:
    found = {(one.section, one.key) for one in compare_facts(given(), given(**change))}
    assert (section, key) in found
    assert {one[0] for one in found} == {section}


def test_configs_are_compared_key_by_key() -> None:
    a = spec(config={"optimizer": {"lr": 6e-4, "name": "adamw"}})
    b = spec(config={"optimizer": {"lr": 1e-4, "name": "adamw"}, "seed": 1})
    found = {one.key: (one.a, one.b) for one in compare_specs(a, b)}
    assert found == {"optimizer.lr": ("0.0006", "0.0001"), "seed": (None, "1")}


def test_flat_keeps_empty_mappings_and_nulls_visible() -> None:
    assert flat({"a": {}, "b": None, "c": {"d": [1]}}) == {"a": "{}", "b": "null", "c.d": "[1]"}


def test_code_is_shown_as_a_unified_diff_that_cannot_steer_the_terminal() -> None:
    (one,) = compare_code({"trainer/step.py": ["a\nb\n", "a\n\x1b[2Jc\n"]}, "r1", "r2")
    assert one.diff.splitlines() == [
        "--- r1/trainer/step.py",
        "+++ r2/trainer/step.py",
        "@@ -1,2 +1,2 @@",
        " a",
        "-b",
        "+\\x1b[2Jc",
    ]


def test_a_file_that_only_one_run_has_is_shown_whole() -> None:
    (one,) = compare_code({"trainer/new.py": [None, "x\n"]}, "r1", "r2")
    assert "+x" in one.diff


def make_run(root: Path, name: str, release: str, text: str, data: str | None) -> None:
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    kept = spec(run=name, release=release).model_dump(by_alias=True)
    (folder / "spec.json").write_text(json.dumps(kept))
    (folder / "facts.json").write_text((FIXTURES / "facts.json").read_text())
    code = root / "releases" / release / "trainer"
    code.mkdir(parents=True, exist_ok=True)
    (code / "step.py").write_text(text)
    (code / "same.py").write_text("same\n")
    if data is not None:
        (folder / "log").write_text(f"2026-11-30T07:20:00.123Z INFO main drafter of 2 layers of /t; rows {data}\n")


def test_diff_answers_what_changed_between_two_kept_runs(tmp_path: Path) -> None:
    make_run(tmp_path, "good", "a" * 32, "lr = 1\n", "1" * 32)
    make_run(tmp_path, "bad", "b" * 32, "lr = 2\n", "2" * 32)
    answer = diff(Session(None, "lab", InProcess(tmp_path), quiet=True), "good", "bad")  # type: ignore[arg-type]
    assert [file.path for file in answer.code] == ["trainer/step.py"]
    assert {(one.section, one.key) for one in answer.differences} == {("code", "release"), ("data", "rows")}
    assert answer.incomplete == ()


def test_diff_says_what_it_could_not_compare(tmp_path: Path) -> None:
    make_run(tmp_path, "a", "a" * 32, "x\n", None)
    make_run(tmp_path, "b", "a" * 32, "x\n", "2" * 32)
    (tmp_path / "runs/a/facts.json").unlink()
    answer = diff(Session(None, "lab", InProcess(tmp_path), quiet=True), "a", "b")  # type: ignore[arg-type]
    assert answer.same
    assert len(answer.incomplete) == 2


def test_a_run_with_a_damaged_spec_is_refused_in_a_sentence(tmp_path: Path) -> None:
    make_run(tmp_path, "a", "a" * 32, "x\n", None)
    make_run(tmp_path, "b", "a" * 32, "x\n", None)
    (tmp_path / "runs/b/spec.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigurationError, match="damaged"):
        diff(Session(None, "lab", InProcess(tmp_path), quiet=True), "a", "b")  # type: ignore[arg-type]
