"""From source files to rows: shapes of records, the cache, and sentences about what is wrong."""

from __future__ import annotations

import gzip
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from tests.trainer import chatting
from trainer.config.sections import DataConfig, TargetConfig
from trainer.data import DataError, Documents, dataset, progress
from trainer.data.dataset import open_documents, open_rows

CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day, friend."}]
ANSWER = "Good day, friend.<|im_end|>"


def jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data(*sources: Path, **more: Any) -> DataConfig:
    return DataConfig(sources=list(sources), **{"sequence_length": 64, "anchors_per_row": 8, "epochs": 2} | more)


def supervised_texts(documents: Documents) -> list[str]:
    tokenizer = chatting.tokenizer()
    pairs = (documents.document(number) for number in range(len(documents)))
    return [tokenizer.decode(ids[flags]) for ids, flags in pairs]


RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": CHAT}, ANSWER),
    "conversations": ({"conversations": CHAT}, ANSWER),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Good day, friend."}]},
        ANSWER,
    ),
    "parts": (
        {
            "messages": [
                turn | {"content": [{"type": "text", "text": turn["content"]}, {"type": "text", "text": None}]}
                for turn in CHAT
            ]
        },
        ANSWER,
    ),
    "sharegpt of another model": (
        {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "chatgpt", "value": "Good day, friend."}]},
        ANSWER,
    ),
    "text": ({"text": "Once upon a time."}, "Once upon a time."),
}


@pytest.mark.parametrize("shape", RECORDS)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_records_of_every_shape_are_read_from_every_kind_of_file(
    shape: str, kind: str, tmp_path: Path, target: TargetConfig
) -> None:
    record, expected = RECORDS[shape]
    path = tmp_path / f"source.{kind}"
    if kind == "parquet":
        write_table(pyarrow.Table.from_pylist([record]), path)
    elif kind == "jsonl":
        jsonl(path, [record])
    else:
        path.write_bytes(gzip.compress(json.dumps(record).encode() + b"\n"))
    assert supervised_texts(open_documents(data(path), target)) == [expected]


def test_token_ids_are_taken_as_they_are_and_win_over_messages(tmp_path: Path, target: TargetConfig) -> None:
    record = {"messages": CHAT, "input_ids": [30, 31, 32, 33], "loss_mask": [0, 0, 1, 1]}
    documents = open_documents(data(jsonl(tmp_path / "a.jsonl", [record])), target)
    ids, flags = documents.document(0)
    assert ids.tolist() == [30, 31, 32, 33]
    assert flags.tolist() == [False, False, True, True]


def test_several_sources_follow_each_other(tmp_path: Path, target: TargetConfig) -> None:
    first = jsonl(tmp_path / "a.jsonl", [{"text": "The first one."}])
    second = jsonl(tmp_path / "b.jsonl", [{"text": "The second one."}, {"text": "The third one."}])
    assert supervised_texts(open_documents(data(first, second), target)) == [
        "The first one.",
        "The second one.",
        "The third one.",
    ]


def test_what_became_of_the_records_is_counted_and_said(
    tmp_path: Path, target: TargetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        [
            {"messages": CHAT},
            {"messages": CHAT[:1]},
            {"messages": [CHAT[0], {"role": "assistant", "content": "odd \ue0f0"}]},
            {"text": "word " * 400},
            {"text": ""},
        ],
    )
    with caplog.at_level(logging.INFO):
        rows = open_rows(data(path), target).training
    found = rows.statistics
    assert (found.records, found.documents, found.unanchored, found.untellable, found.cut) == (5, 2, 3, 1, 1)
    assert found.cut_tokens > 0
    assert rows.total_rows == 2 * rows.rows_per_epoch
    assert "2 of 5 records can be trained on" in caplog.text
    assert "in 1 record the chat template does not show what the assistant wrote" in caplog.text
    assert "a.jsonl line 3" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        open_rows(data(path), target)  # from the cache
    assert "3 without an anchor position; 1 with an answer that the chat template hides; 1 cut (" in caplog.text


def test_a_chat_that_the_template_refuses_is_counted_and_the_first_is_named(
    tmp_path: Path, target: TargetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(chatting.RENAMING)
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": [{"role": "system", "content": "x"}, *CHAT]}])
    documents = open_documents(data(path, chat_template=template), target)
    assert documents.statistics.refused == 1
    assert "refused 1 record, the first is a.jsonl line 2: no system turn" in caplog.text
    assert supervised_texts(documents) == ["Good day, friend.<end_of_turn>"]


def test_a_chat_with_an_image_is_counted_and_does_not_end_the_run(
    tmp_path: Path, target: TargetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    image = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is it?"}]}
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [image, CHAT[1]]}, {"messages": CHAT}])
    with caplog.at_level(logging.INFO):
        rows = open_rows(data(path), target).training
    assert (rows.statistics.documents, rows.statistics.unsupported) == (1, 1)
    assert "left out: 1 record, the first is a.jsonl line 1: the content of a message must be text" in caplog.text
    assert "1 without an anchor position, 1 with more than text;" in caplog.text


def test_reasoning_that_the_template_drops_is_counted_and_said(
    tmp_path: Path, target: TargetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(chatting.CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"))
    thinking = {"role": "assistant", "content": "<think>Somebody greets.</think>Good day, friend."}
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": [CHAT[0], thinking]}])
    with caplog.at_level(logging.INFO):
        rows = open_rows(data(path, chat_template=template), target).training
    assert rows.statistics.reasoning_dropped == 1
    assert "in 1 record the chat template drops the assistant's reasoning, the first is a.jsonl line 2;" in caplog.text
    assert "; 1 with reasoning that the chat template drops; " in caplog.text


def test_calls_are_the_same_tokens_from_jsonl_and_from_parquet_which_fills_keys_with_null(
    tmp_path: Path, target: TargetConfig
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ tools | tojson }}"
        + chatting.CHATML.replace("<|im_end|>", "{{ m.tool_calls | default([]) | tojson }}<|im_end|>")
    )
    records = [
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": given}]},
            ],
            "tools": [{"type": "function", "function": {"name": name, "parameters": dict.fromkeys(given, "text")}}],
        }
        for name, given in (("pay", {"recipient": "Ann"}), ("clock", {"zone": "UTC"}))
    ]
    write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    jsonl(tmp_path / "a.jsonl", records)
    from_lines, from_columns = (
        open_documents(data(tmp_path / name, chat_template=template), target) for name in ("a.jsonl", "a.parquet")
    )
    assert from_lines.tokens.tolist() == from_columns.tokens.tolist()
    assert from_lines.supervised.tolist() == from_columns.supervised.tolist()


def test_raw_text_needs_no_chat_template(tmp_path: Path) -> None:
    chatting.save(chatting.tokenizer(None), tmp_path / "bare")
    target = TargetConfig(path=str(tmp_path / "bare"))
    path = jsonl(tmp_path / "a.jsonl", [{"text": "Once upon a time."}])
    assert len(open_documents(data(path), target)) == 1
    chats = jsonl(tmp_path / "b.jsonl", [{"messages": CHAT}])
    with pytest.raises(DataError, match="no chat template"):
        open_documents(data(chats), target)


def test_documents_are_tokenised_once(tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    first = open_documents(data(path), target)
    monkeypatch.setattr(dataset, "_build", lambda *_: pytest.fail("built again"))
    again = open_documents(data(path), target)
    assert again.content_hash == first.content_hash
    assert again.document(0)[0].tolist() == first.document(0)[0].tolist()


def test_the_content_hash_follows_everything_that_changes_tokens_and_nothing_else(
    tmp_path: Path, target: TargetConfig
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(chatting.TRIMMING)
    chatting.save(chatting.tokenizer(chatting.REASONING), tmp_path / "other")
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    copy = jsonl(tmp_path / "copy.jsonl", [{"messages": CHAT}])
    changed = jsonl(tmp_path / "changed.jsonl", [{"messages": CHAT * 2}])
    base = open_documents(data(path), target).content_hash
    assert open_documents(data(copy, anchors_per_row=3, seed=5), target).content_hash == base
    chatting.save(chatting.tokenizer(), tmp_path / "named")
    named = tmp_path / "named" / "tokenizer_config.json"
    named.write_text(named.read_text().replace("<|im_end|>", "<|eot|>"))
    chatting.save(chatting.tokenizer(), tmp_path / "stopping")
    (tmp_path / "stopping" / "generation_config.json").write_text('{"eos_token_id": [2, 6]}')
    chatting.save(chatting.tokenizer(), tmp_path / "moved")
    assert open_documents(data(path), TargetConfig(path=str(tmp_path / "moved"))).content_hash == base
    others = [
        open_documents(data(path), TargetConfig(path=str(tmp_path / "named"))),
        open_documents(data(path), TargetConfig(path=str(tmp_path / "stopping"))),
        open_documents(data(changed), target),
        open_documents(data(path, copy), target),
        open_documents(data(path, max_document_length=30), target),
        open_documents(data(path, chat_template=template), target),
        open_documents(data(path, chat_template_kwargs={"thinking": False}), target),
        open_documents(data(path), TargetConfig(path=str(tmp_path / "other"))),
    ]
    hashes = {documents.content_hash for documents in others}
    assert len(hashes) == len(others)
    assert base not in hashes


def test_several_processes_give_the_documents_of_one_in_their_order(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"text": f"Number {number} of many."} for number in range(700)))
    alone = open_documents(data(path, cache_dir=tmp_path / "alone"), target)
    monkeypatch.setattr(dataset, "_WORTH_PROCESSES", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    shared = open_documents(data(path, cache_dir=tmp_path / "shared"), target)
    assert shared.statistics == alone.statistics
    assert shared.tokens.tolist() == alone.tokens.tolist()
    assert shared.supervised.tolist() == alone.supervised.tolist()


def _hash_of(path: Path, target: TargetConfig) -> str:
    return open_documents(data(path), target).content_hash


def test_processes_that_build_at_once_share_one_result(tmp_path: Path, target: TargetConfig) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"text": f"Number {number} of many."} for number in range(300)))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        hashes = pool.starmap(_hash_of, [(path, target)] * 4)
    assert len(set(hashes)) == 1
    assert sorted(entry.name for entry in (tmp_path / ".dflash-cache").iterdir()) == [hashes[0], f"{hashes[0]}.lock"]


def test_a_killed_build_is_built_anew(tmp_path: Path, folder: Path, target: TargetConfig) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"text": f"Number {number} of many."} for number in range(3000)))
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from tests.trainer.data.test_dataset import data, TargetConfig, open_documents\n"
        f"open_documents(data(Path({str(path)!r})), TargetConfig(path={str(folder)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    cache = tmp_path / ".dflash-cache"
    deadline = time.monotonic() + 120
    while not list(cache.glob(".building-*/tokens.i32")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    documents = open_documents(data(path), target)
    assert documents.statistics.documents == 3000
    assert not list(cache.glob(".building-*"))


def test_long_work_tells_how_far_it_is_where_there_is_no_terminal(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"text": f"Number {number} of many."} for number in range(300)))
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO):
        open_documents(data(path), target)
    assert "tokenising: 256 of 300 (85 %)" in caplog.text
    assert "tokenising: 300 of 300 (100 %)" in caplog.text
