"""What is wrong with records, files and caches, each in one sentence."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import chatting
from tests.trainer.data.test_dataset import data, jsonl
from trainer.config.sections import TargetConfig
from trainer.data import DataError, dataset
from trainer.data.dataset import open_documents, open_rows


def test_ids_are_held_against_the_targets_embedding_which_may_be_larger_or_smaller_than_its_tokenizer(
    folder: Path, tmp_path: Path, target: TargetConfig
) -> None:
    padding = {"input_ids": [1, 31999], "loss_mask": [0, 1]}
    open_documents(data(jsonl(tmp_path / "a.jsonl", [padding])), target)
    chatting.save(chatting.tokenizer(), tmp_path / "small")
    (tmp_path / "small" / "config.json").write_text('{"model_type": "llama", "vocab_size": 100}')
    with pytest.raises(DataError, match=r"a.jsonl line 1 holds token ids outside the target's 100$"):
        open_documents(
            data(jsonl(tmp_path / "a.jsonl", [{"text": "Once upon a time."}])),
            TargetConfig(path=str(tmp_path / "small")),
        )


def test_a_damaged_cache_is_one_sentence_that_says_what_to_delete(tmp_path: Path, target: TargetConfig) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "Once upon a time."}])
    folder = tmp_path / ".dflash-cache" / open_documents(data(path), target).content_hash
    for name in ("documents.json", "tokens.i32", "supervised.b1", "offsets.npy", "candidates.npy"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=rf"in {folder} are damaged .*: delete this folder"):
            open_documents(data(path), target)
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"in {folder} are damaged .*: delete this folder"):
            open_documents(data(path), target)
        (folder / name).write_bytes(whole)
    assert len(open_documents(data(path), target)) == 1


FAULTS: dict[str, tuple[str, str]] = {
    "no JSON": ('{"text": "a"}\n{"text": \n', r"a.jsonl line 2 is not JSON: .+"),
    "no object": ("[1]\n", r"a.jsonl line 1 must be an object, not list"),
    "no known key": ('{"prompt": "a"}\n', r"a.jsonl line 1 has none of input_ids.*its keys are \['prompt'\]"),
    "no role": ('{"messages": [{"content": "a"}]}\n', r"a.jsonl line 1: a message needs a role"),
    "no list": ('{"messages": "a"}\n', r"a.jsonl line 1: a chat must be a list of messages"),
    "content that is a number": (
        '{"messages": [{"role": "user", "content": 3}]}\n',
        r"a.jsonl line 1: the content of a message must be text",
    ),
    "another framework's mask": (
        '{"input_ids": [1, 2], "loss_mask": [-100, 1]}\n',
        r"a.jsonl line 1: loss_mask must hold 1 \(learned\), 0, true or false, not -100",
    ),
    "a mask of texts": ('{"input_ids": [1, 2], "loss_mask": ["0", "0"]}\n', r"loss_mask must hold 1 .* not '0'"),
    "a mask with holes": ('{"input_ids": [1, 2], "loss_mask": [1, null]}\n', r"loss_mask must hold 1 .* not None"),
    "deep nesting": ('{"text": ' + "[" * 100000 + "]" * 100000 + "}\n", r"a.jsonl line 1 is nested too deeply$"),
    "tools that are no JSON": ('{"messages": [], "tools": "clock"}\n', r"a.jsonl line 1: tools is text, but not JSON$"),
    "no mask": ('{"input_ids": [1, 2]}\n', r"a.jsonl line 1 needs a loss_mask as long as its input_ids"),
    "ids that are no list": (
        '{"input_ids": 5, "loss_mask": 5}\n',
        r"a.jsonl line 1: input_ids must be a list of integers",
    ),
    "ids that are no numbers": (
        '{"input_ids": [1, "a"], "loss_mask": [1, 1]}\n',
        r"a.jsonl line 1: input_ids must be a list of integers",
    ),
    "a mask that is no list": (
        '{"input_ids": [1, 2], "loss_mask": 1}\n',
        r"a.jsonl line 1 needs a loss_mask as long as its input_ids",
    ),
    "half a character": ('{"text": "x \\uD83D y"}\n', r"a.jsonl line 1 holds half of a surrogate pair"),
    "foreign ids": (
        '{"input_ids": [1, 99999], "loss_mask": [1, 1]}\n',
        r"a.jsonl line 1 holds token ids outside the target's 32000$",
    ),
    "an id that no array holds": (
        '{"input_ids": [1, 99999999999], "loss_mask": [1, 1]}\n',
        r"a.jsonl line 1 holds token ids outside the target's 32000$",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_record_is_named_by_file_and_line(fault: str, tmp_path: Path, target: TargetConfig) -> None:
    text, message = FAULTS[fault]
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        open_documents(data(path), target)
    assert [entry.suffix for entry in (tmp_path / ".dflash-cache").iterdir()] == [".lock"]


def test_missing_unknown_and_damaged_files_are_one_sentence_each(tmp_path: Path, target: TargetConfig) -> None:
    with pytest.raises(DataError, match=r"source .*nowhere.jsonl does not exist"):
        open_documents(data(tmp_path / "nowhere.jsonl"), target)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a.txt must end in .jsonl, .json, .jsonl.gz, .json.gz or .parquet$"):
        open_documents(data(tmp_path / "a.txt"), target)
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(DataError, match=r"source .*a.parquet is damaged: "):
        open_documents(data(tmp_path / "a.parquet"), target)
    packed = gzip.compress(json.dumps({"text": "Once upon a time. " * 500}).encode() + b"\n")
    for damaged in (packed[:-20], packed[:40] + b"\0\0\0" + packed[43:], b"no gzip at all"):
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"source .*a.jsonl.gz is damaged: ") as caught:
            open_documents(data(tmp_path / "a.jsonl.gz"), target)
        assert "\n" not in str(caught.value)


def test_a_build_that_fails_leaves_no_half_of_itself_and_blames_whom_it_should(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "Once upon a time."}])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(dataset.DocumentWriter, "add", full)
        with pytest.raises(DataError, match=r"cannot be written to .*: No space left on device; set data.cache_dir"):
            open_documents(data(path), target)
    cache = tmp_path / ".dflash-cache"
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot JSON\n')
    with pytest.raises(DataError, match=r"a.jsonl line 2 is not JSON"):
        open_documents(data(path), target)
    assert {entry.suffix for entry in cache.iterdir()} == {".lock"}


def test_an_empty_source_is_one_sentence(tmp_path: Path, target: TargetConfig) -> None:
    with pytest.raises(DataError, match="none of the 0 records can be trained on"):
        open_rows(data(jsonl(tmp_path / "a.jsonl", [])), target)


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path, target: TargetConfig) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "Once upon a time."}])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written to .*file/cache: .*; set data.cache_dir"):
        open_documents(data(path, cache_dir=tmp_path / "file" / "cache"), target)
