"""What `data.sources` may name: files, folders, patterns, data sets on the hub."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from tests.trainer.fake_hub import serving
from trainer.config.sections import TargetConfig
from trainer.data import DataError
from trainer.data.sources import count_records, find_files, read_fields
from trainer.hub import drafter_folder
from trainer.inputs import InputError, hub_answers, require_sources, require_target

LINE = b'{"text": "a"}\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with no hub and no cache of one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / ".hub"))
    hub_answers.cache_clear()
    return tmp_path


def files(*names: str) -> list[Path]:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(LINE)
    return [Path(name) for name in names]


def names(*sources: str) -> list[str]:
    paths = [Path(source) for source in sources]
    require_sources(paths)
    return [str(path) for path in find_files(paths)]


def test_a_folder_is_all_its_files_of_records_in_the_order_of_their_names(here: Path) -> None:
    files("a/2.jsonl", "a/1.jsonl.gz", "a/deep/3.parquet", "a/4.json", "a/README.md", "a/.dflash-cache/x/y.json")
    assert names("a") == ["a/1.jsonl.gz", "a/2.jsonl", "a/4.json", "a/deep/3.parquet"]
    assert names(str(here / "a"))[0] == str(here / "a/1.jsonl.gz")


def test_a_pattern_is_the_files_that_it_matches(here: Path) -> None:
    files("a/train-1.jsonl", "a/train-2.jsonl", "a/test-1.jsonl", "a/deep/train-3.jsonl", "a/[1].jsonl")
    assert names("a/train-*.jsonl") == ["a/train-1.jsonl", "a/train-2.jsonl"]
    assert names(str(here / "a/**/train-*")) == [
        str(here / f"a/{name}") for name in ("deep/train-3.jsonl", "train-1.jsonl", "train-2.jsonl")
    ]
    assert names("a/[1].jsonl") == ["a/[1].jsonl"], "a file of that very name"
    assert names("a/test-*", "a/train-1.jsonl") == ["a/test-1.jsonl", "a/train-1.jsonl"]


@pytest.mark.parametrize("source", ["empty", "a/*.jsonl", "a/none-*"])
def test_a_source_that_names_nothing_is_one_sentence(here: Path, source: str) -> None:
    Path("empty").mkdir()
    files("a/train.parquet")
    with pytest.raises(DataError, match=rf"source {source.replace('*', '.')} names no file that ends in .jsonl, .json"):
        names(source)


def test_a_data_set_of_the_hub_is_its_training_files_or_those_that_are_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = dict.fromkeys(("README.md", "data/train-1.jsonl", "data/train-2.jsonl", "data/test-1.jsonl"), LINE)
    repositories = {"datasets/somebody/chats": contents, "datasets/somebody/plain": {"all.jsonl": LINE, "b.bin": b"x"}}
    with serving(monkeypatch, here / ".hub", repositories):
        found = find_files([Path("somebody/chats")])
        assert [path.name for path in found] == ["train-1.jsonl", "train-2.jsonl"]
        assert found[0].read_bytes() == LINE
        assert [Path(name).name for name in names("somebody/chats/data/t*-1.jsonl")] == [
            "test-1.jsonl",
            "train-1.jsonl",
        ]
        assert len(names("somebody/chats/data")) == 3
        assert [Path(name).name for name in names("somebody/plain")] == ["all.jsonl"]
        with pytest.raises(InputError, match=r"data.sources: .*nobody/nothing cannot be fetched from the model hub: "):
            names("nobody/nothing")
    again = find_files([Path("somebody/plain")])
    assert [path.name for path in again] == ["all.jsonl"], "fetched before, had without the hub"


def test_without_a_hub_a_name_is_one_sentence(here: Path) -> None:
    for source in ("somebody/chats", "chats", "somebody/chats/data/*.parquet"):
        with pytest.raises(InputError) as caught:
            names(source)
        assert str(caught.value) == f"data.sources: there is no {source} in {here}, and the model hub does not answer"
    with pytest.raises(InputError, match=r"data.sources: there is no file nowhere.jsonl$"):
        names("nowhere.jsonl")
    with pytest.raises(InputError, match=r"data.sources: there is no file /nowhere/chats$"):
        names("/nowhere/chats")


def test_a_released_drafter_is_fetched_by_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("local").mkdir()
    assert drafter_folder(Path("local")) == Path("local")
    with serving(monkeypatch, here / ".hub", {"models/somebody/drafter": {"config.json": b"{}", "notes.txt": b"x"}}):
        folder = drafter_folder(Path("somebody/drafter"))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    with pytest.raises(InputError, match=r"drafter.init_from: there is no somebody/other in .*hub does not answer"):
        drafter_folder(Path("somebody/other"))


def test_an_adapter_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"target.path: .* holds a LoRA adapter, not a model: merge it first"):
        require_target(TargetConfig(path=str(tmp_path)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_json_file_may_be_an_array_or_lines(tmp_path: Path, packed: bool) -> None:
    records: list[dict[str, Any]] = [{"text": "a"}, {"text": "b"}]
    for text in (json.dumps(records, indent=1), "".join(json.dumps(record) + "\n" for record in records)):
        path = tmp_path / ("a.json.gz" if packed else "a.json")
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        assert [fields for _, fields in read_fields(path)] == records
        assert count_records(path) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"text": "a"}, 1]', r"a.json record 2 must be an object, not int"),
        ('[{"text": "a"}', r"source .*a.json is not JSON: "),
        ("[" * 100000 + "]" * 100000, r"source .*a.json is nested too deeply"),
        ('[{"text": "x \\ud83d y"}]', r"a.json record 1 holds half of a surrogate pair"),
        ("{", r"a.json line 1 is not JSON"),
    ],
    ids=["no object", "cut", "deep", "half a character", "no array"],
)
def test_a_damaged_array_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=says):
        list(read_fields(tmp_path / "a.json"))
