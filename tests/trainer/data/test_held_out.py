"""Conversations are held out by their content, whole, and never trained on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config.sections import DataConfig, TargetConfig
from trainer.data import DataError, Documents, RowSource
from trainer.data.dataset import RunRows, open_rows
from trainer.data.held_out import split


def documents(*numbers: int) -> Documents:
    return Documents.from_lists([([n + 1] * 3 + list(range(n % 7, 30)), [True] * (33 - n % 7)) for n in numbers])


def contents(part: Documents) -> list[tuple[int, ...]]:
    return [tuple(part.document(number)[0].tolist()) for number in range(len(part))]


def test_each_conversation_is_on_one_side_and_both_together_are_all() -> None:
    whole = documents(*range(400))
    trained, held_out = split(whole, 0.25, 0)
    assert sorted(contents(trained) + contents(held_out)) == sorted(contents(whole))
    assert 60 < len(held_out) < 140
    for part in (trained, held_out):
        assert part.statistics.documents == len(part) == len(part.lengths) == len(part.candidates)
        assert part.statistics.tokens == int(part.lengths.sum()) == sum(map(len, contents(part)))
        assert part.statistics.supervised == part.statistics.tokens
    assert len({whole.content_hash, trained.content_hash, held_out.content_hash}) == 3


def test_the_side_follows_from_content_and_seed_alone() -> None:
    some, more = documents(*range(0, 400, 2)), documents(*reversed(range(400)))
    for seed in (0, 1):
        held_out = set(contents(split(some, 0.25, seed)[1]))
        assert held_out == set(contents(split(more, 0.25, seed)[1])) & set(contents(some))
    assert set(contents(split(some, 0.25, 0)[1])) != held_out


def test_equal_conversations_are_not_divided() -> None:
    trained, held_out = split(documents(*range(100), *range(100)), 0.3, 0)
    assert not set(contents(trained)) & set(contents(held_out))
    assert len(held_out) == 2 * len(set(contents(held_out)))


@pytest.mark.parametrize(("share", "side"), [(1e-9, "none"), (1 - 1e-9, "all")])
def test_a_share_that_leaves_a_side_empty_is_refused_with_the_cure(share: float, side: str) -> None:
    with pytest.raises(DataError, match=f"holds out {side} of 20 documents: take another share, or name a file"):
        split(documents(*range(20)), share, 0)


def test_rows_of_a_part_hold_its_documents_and_name_them_by_their_place_among_all() -> None:
    whole = documents(*range(40))
    trained, held_out = split(whole, 0.3, 0)
    named: list[int] = []
    for part in (trained, held_out):
        rows = RowSource(part, sequence_length=64, anchors_per_row=8, epochs=1, seed=0)
        assert 0 < rows.fill <= 1
        for number in range(rows.total_rows):
            members = rows.documents(number)
            row = rows.row(number)
            expected = np.concatenate([whole.document(member)[0] for member in members])
            assert sorted(row.input_ids.tolist()[: len(expected)]) == sorted(expected.tolist())
            named += members
    assert sorted(named) == list(range(40))


def write(path: Path, numbers: range) -> Path:
    lines = ({"input_ids": [4 + n] * 3 + list(range(20)), "loss_mask": [1] * 23} for n in numbers)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def opened(target: TargetConfig, *sources: Path, **more: Any) -> RunRows:
    settings = {"sources": list(sources), "sequence_length": 64, "anchors_per_row": 8, "epochs": 2, **more}
    return open_rows(DataConfig.model_validate(settings), target)


def test_a_file_is_measured_on_and_leaves_the_training_rows_as_they_are(
    tmp_path: Path, target: TargetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    source, other = write(tmp_path / "a.jsonl", range(10)), write(tmp_path / "b.jsonl", range(50, 56))
    alone = opened(target, source)
    assert alone.held_out is None
    with caplog.at_level(logging.INFO):
        both = opened(target, source, held_out=str(other))
    assert both.training.content_hash == alone.training.content_hash
    assert both.held_out is not None
    assert both.held_out.statistics.documents == 6
    assert (
        f"held out: 6 documents of {other}, 3 rows, every 200 steps; rows {both.held_out.content_hash}" in caplog.text
    )


def test_a_share_is_taken_from_the_sources_and_stated(
    tmp_path: Path, target: TargetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(tmp_path / "a.jsonl", range(60))
    with caplog.at_level(logging.INFO):
        rows = opened(target, source, held_out=0.2, held_out_rows=2)
    assert rows.held_out is not None
    held_out, trained = rows.held_out.statistics.documents, rows.training.statistics.documents
    assert held_out + trained == 60
    assert f"{trained} of 60 records can be trained on and are not held out: " in caplog.text
    assert f"held out: {held_out} documents of data.sources, " in caplog.text
    assert "of which data.held_out_rows 2 are measured, every 200 steps; rows " in caplog.text
    again = opened(target, source, held_out=0.2, held_out_rows=2).held_out
    assert again is not None
    assert again.content_hash == rows.held_out.content_hash
    assert opened(target, source, held_out=0.2, seed=1).training.content_hash != rows.training.content_hash


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, 2])
def test_a_share_outside_of_zero_and_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="held_out"):
        DataConfig.model_validate({"sources": ["a"], "held_out": share})
