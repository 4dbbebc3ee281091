"""Packing and rows: every token once, anchors fair and valid, the same rows for everyone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import DataError, Documents, Row, RowSource
from trainer.data.documents import anchor_candidates
from trainer.data.packing import best_fit_decreasing, share_anchors

LENGTH = 48


@st.composite
def document_sets(draw: st.DrawFn) -> Documents:
    """A few documents whose tokens are all different, so that a token in a row names its place of origin."""
    lengths = draw(st.lists(st.integers(0, LENGTH + 10), min_size=1, max_size=25))
    documents = []
    first = 1
    for length in lengths:
        flags = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        documents.append((range(first, first + length), flags))
        first += length
    return Documents.from_lists(documents, max_length=LENGTH)


def source(documents: Documents, anchors: int = 7, epochs: int = 2, seed: int = 0) -> RowSource:
    return RowSource(documents, sequence_length=LENGTH, anchors_per_row=anchors, epochs=epochs, seed=seed)


def plain(count: int, length: int = 20, prompt: int = 5) -> Documents:
    return Documents.from_lists(
        [(range(n * 100, n * 100 + length), [place >= prompt for place in range(length)]) for n in range(count)]
    )


def same(first: Row, second: Row) -> bool:
    return all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("input_ids", "position_ids", "document_start", "loss_mask", "anchors", "anchor_valid")
    )


@given(document_sets(), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_an_epoch_holds_every_token_of_every_trainable_document_exactly_once(
    documents: Documents, anchors: int
) -> None:
    if not len(documents):
        return
    rows = source(documents, anchors)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for number in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
            row = rows.row(number)
            assert row.epoch == epoch
            seen.update(token for token in row.input_ids.tolist() if token)
        assert seen == Counter(documents.tokens.tolist())


@given(document_sets(), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_a_row_keeps_documents_whole_and_its_fields_agree(documents: Documents, anchors: int) -> None:
    if not len(documents):
        return
    rows = source(documents, anchors)
    whole = {tuple(documents.document(number)[0].tolist()) for number in range(len(documents))}
    flags = dict(zip(documents.tokens.tolist(), documents.supervised.tolist(), strict=True))
    for number in range(rows.total_rows):
        row = rows.row(number)
        ids, starts = row.input_ids.tolist(), row.document_start.tolist()
        end = len([token for token in ids if token])
        assert not any(ids[end:]), "padding comes last"
        assert starts[end:] == list(range(end, LENGTH))
        assert not row.loss_mask[end:].any()
        for start in sorted(set(starts[:end])):
            places = [place for place in range(end) if starts[place] == start]
            assert places == list(range(start, start + len(places)))
            assert tuple(ids[place] for place in places) in whole
            assert row.position_ids[places].tolist() == list(range(len(places)))
        assert row.loss_mask[:end].tolist() == [flags[token] for token in ids[:end]]


@given(document_sets(), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_anchors_are_distinct_ascending_supervised_and_followed_by_a_supervised_token(
    documents: Documents, anchors: int
) -> None:
    if not len(documents):
        return
    rows = source(documents, anchors)
    for number in range(rows.total_rows):
        row = rows.row(number)
        assert row.anchors.shape == row.anchor_valid.shape == (anchors,)
        count = int(row.anchor_valid.sum())
        assert row.anchor_valid.tolist() == [True] * count + [False] * (anchors - count)
        assert (row.anchors[count:] == LENGTH - 1).all()
        valid = row.anchors[:count]
        assert (valid.diff() > 0).all()
        assert (row.position_ids[valid] > 0).all(), "an anchor has context"
        assert row.loss_mask[valid].all()
        assert row.loss_mask[valid + 1].all()
        assert torch.equal(row.document_start[valid], row.document_start[valid + 1])
        starts = set(row.document_start[row.input_ids != 0].tolist())
        assert set(row.document_start[valid].tolist()) == starts, "every document of a row has an anchor"


@given(document_sets(), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_every_row_keeps_to_the_shape_of_its_source(documents: Documents, anchors: int) -> None:
    if not len(documents):
        return
    rows = source(documents, anchors)
    shape = rows.shape
    assert (shape.tokens, shape.anchors) == (LENGTH, anchors)
    for number in range(rows.total_rows):
        row = rows.row(number)
        starts = row.document_start[row.input_ids != 0]
        sizes = starts.unique(return_counts=True)[1]
        assert len(sizes) <= shape.documents
        assert int(sizes.max()) <= shape.longest


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(0, 300),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_shares_are_exact_and_within_one_anchor_of_proportion(counts: list[int], more: int, draw: float) -> None:
    candidates = np.asarray(counts, np.int64)
    anchors = len(counts) + more
    spare = int(candidates.sum()) - len(counts)
    shares = share_anchors(candidates, anchors, int(draw * spare))
    assert shares.sum() == min(anchors, candidates.sum())
    assert (shares >= 1).all()
    assert (shares <= candidates).all()
    if candidates.sum() > anchors:
        exact = 1 + (candidates - 1) * (anchors - len(counts)) / spare
        assert (np.abs(shares - exact) < 1).all()


def test_every_candidate_position_becomes_an_anchor_equally_often() -> None:
    """Short documents are neither drowned by long ones nor favoured: shares come out right on average."""
    lengths = (4, 6, 38)
    documents = Documents.from_lists(
        [(range(100 * n, 100 * n + size), [True] * size) for n, size in enumerate(lengths)]
    )
    rows = RowSource(documents, sequence_length=LENGTH, anchors_per_row=12, epochs=4000, seed=1)
    assert rows.rows_per_epoch == 1
    drawn: Counter[int] = Counter()
    for number in range(rows.total_rows):
        row = rows.row(number)
        drawn.update((row.input_ids[row.anchors[row.anchor_valid]] // 100).tolist())
    counts = np.asarray([size - 2 for size in lengths])
    expected = 1 + (counts - 1) * (12 - 3) / (counts.sum() - 3)
    assert [drawn[n] / rows.total_rows for n in range(3)] == pytest.approx(expected, rel=0.03)


@given(st.lists(st.integers(1, 100), max_size=200), st.one_of(st.integers(1, 12), st.just(1000)))
@settings(max_examples=150, deadline=None)
def test_the_layout_gives_every_document_a_place_and_overfills_no_row(lengths: list[int], most: int) -> None:
    descending = np.sort(np.asarray(lengths, np.int64))[::-1]
    layout = best_fit_decreasing(descending, 100, most)
    assert sorted(layout.places.tolist()) == list(range(len(lengths)))
    fills = []
    for row in range(layout.rows):
        members = layout.places[layout.starts[row] : layout.starts[row + 1]]
        assert 0 < len(members) <= most
        fills.append(int(descending[members].sum()))
        assert fills[-1] <= 100
    if most == 1000 and len(fills) > 1:
        assert sum(sorted(fills)[:2]) > 100, "two rows that would fit into one would have been one"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_each_document_goes_to_the_fullest_row_that_has_room_for_it(lengths: list[int]) -> None:
    descending = sorted(lengths, reverse=True)
    fills: list[int] = []
    for length in descending:
        fitting = [row for row, fill in enumerate(fills) if fill + length <= 30]
        row = max(fitting, key=fills.__getitem__, default=len(fills))
        fills[row : row + 1] = [sum(fills[row : row + 1]) + length]
    layout = best_fit_decreasing(np.asarray(lengths, np.int64), 30, most=len(lengths))
    places = [layout.places[start:end].tolist() for start, end in itertools.pairwise(layout.starts)]
    assert sorted(sum(descending[place] for place in row) for row in places) == sorted(fills)


def test_packing_wastes_little_on_lengths_as_they_occur() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6, 1, 4000).astype(np.int64), 4, 3072)
    layout = best_fit_decreasing(lengths, 3072, 512)
    assert lengths.sum() / (3072 * layout.rows) > 0.99


def test_rows_do_not_depend_on_the_order_in_which_they_are_asked_for_nor_on_threads() -> None:
    documents = plain(40)
    rows, again = source(documents, epochs=3), source(documents, epochs=3)
    numbers = list(range(rows.total_rows))
    ordered = [rows.row(number) for number in numbers]
    with ThreadPoolExecutor(8) as pool:
        scattered = dict(zip(numbers[::-1], pool.map(again.row, numbers[::-1]), strict=True))
    assert all(same(ordered[number], scattered[number]) for number in numbers)


def test_rows_do_not_depend_on_global_generators() -> None:
    documents = plain(10)
    np.random.seed(1)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = source(documents).row(3)
    assert torch.equal(torch.get_rng_state(), state)
    np.random.seed(2)
    torch.manual_seed(2)
    assert same(first, source(documents).row(3))


def test_another_process_sees_the_same_rows() -> None:
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.trainer.data.test_rows import plain, source\n"
        "row = source(plain(30), seed=5).row(9)\n"
        "print(row.input_ids.tolist(), row.anchors.tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    row = source(plain(30), seed=5).row(9)
    assert printed.strip() == f"{row.input_ids.tolist()} {row.anchors.tolist()}"


def test_epochs_differ_in_order_neighbours_and_anchors() -> None:
    rows = source(plain(40), epochs=2)
    epochs = [[rows.row(epoch * rows.rows_per_epoch + n) for n in range(rows.rows_per_epoch)] for epoch in range(2)]
    assert not any(torch.equal(first.input_ids, second.input_ids) for first, second in zip(*epochs, strict=True))
    neighbours = [{frozenset((row.input_ids[row.input_ids > 0] // 100).tolist()) for row in epoch} for epoch in epochs]
    assert neighbours[0] != neighbours[1]
    places = [{tuple(row.input_ids[row.anchors[row.anchor_valid]].tolist()) for row in epoch} for epoch in epochs]
    assert places[0] != places[1]


def test_documents_stand_in_a_row_in_any_order() -> None:
    documents = Documents.from_lists([(range(n * 100, n * 100 + n), [True] * n) for n in (20, 15, 10)])
    rows = source(documents, epochs=100)
    assert rows.rows_per_epoch == 1
    first = Counter(int(rows.row(number).input_ids[0]) // 100 for number in range(100))
    assert min(first[length] for length in (20, 15, 10)) > 15


def test_another_seed_gives_other_rows_and_another_content_hash() -> None:
    documents = plain(40)
    assert not same(source(documents, seed=0).row(0), source(documents, seed=1).row(0))
    assert source(documents, seed=0).content_hash != source(documents, seed=1).content_hash
    assert source(documents).content_hash == source(plain(40)).content_hash
    assert source(documents).content_hash != source(plain(41)).content_hash


def test_the_candidates_of_a_document_exclude_its_first_token_and_tokens_before_a_gap() -> None:
    flags = np.asarray([True, True, True, False, True, False, True, True])
    assert anchor_candidates(flags).tolist() == [1, 6]
    assert anchor_candidates(flags[:0]).tolist() == []


def test_documents_without_an_anchor_position_are_counted_and_left_out() -> None:
    documents = Documents.from_lists(
        [([1, 2, 3], [False, True, True]), ([4, 5, 6], [False, False, True]), ([], []), ([7], [True])]
    )
    assert len(documents) == 1
    assert documents.statistics.records == 4
    assert documents.statistics.unanchored == 3


def test_a_document_loses_only_what_lies_behind_the_greatest_length() -> None:
    documents = Documents.from_lists([(range(10), [True] * 10), (range(10, 14), [True] * 4)], max_length=6)
    assert documents.document(0)[0].tolist() == list(range(6))
    assert documents.document(1)[0].tolist() == [10, 11, 12, 13]
    assert (documents.statistics.cut, documents.statistics.cut_tokens, documents.statistics.tokens) == (1, 4, 10)


def test_a_document_whose_answer_lies_behind_the_cut_is_left_out() -> None:
    documents = Documents.from_lists([(range(20), [place > 10 for place in range(20)])], max_length=8)
    assert len(documents) == 0
    assert documents.statistics.unanchored == 1


def test_nothing_to_train_on_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match="none of the 1 records can be trained on"):
        source(Documents.from_lists([([1, 2, 3], [False] * 3)]))
    with pytest.raises(DataError, match="none of the 0 records"):
        source(Documents.from_lists([]))


def test_a_document_longer_than_a_row_is_an_error_that_names_the_cure() -> None:
    with pytest.raises(DataError, match=r"60 tokens does not fit .* lower data.max_document_length"):
        source(Documents.from_lists([(range(60), [True] * 60)]))


def test_a_row_that_does_not_exist_is_refused() -> None:
    rows = source(plain(4))
    for number in (-1, rows.total_rows):
        with pytest.raises(IndexError, match=f"row {number}"):
            rows.row(number)
