"""Keeps tokenised documents, millions of them, on disk.

All documents stand one behind the other in flat arrays that are memory-mapped, so that opening a set costs nothing and
every process shares one copy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class DataError(Exception):
    """Training data that cannot be used; the text is one sentence that names the place and the cure."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What became of the records of the sources."""

    records: int = 0
    """Records read"""
    documents: int = 0
    """Documents that can be trained on: each has at least one anchor position"""
    unanchored: int = 0
    """Records left out because no two neighbouring tokens of theirs are supervised (after cutting)"""
    refused: int = 0
    """Of these, chats that the chat template refused to render"""
    unsupported: int = 0
    """Of these, chats that hold images or other things that are not text"""
    untellable: int = 0
    """Records, kept or not, with an assistant turn that the chat template did not show"""
    reasoning_dropped: int = 0
    """Records, kept or not, with reasoning of the assistant that the chat template left out"""
    cut: int = 0
    """Documents cut at the greatest length"""
    tokens: int = 0
    """Tokens of the documents kept"""
    supervised: int = 0
    """Of these, tokens under the loss"""
    cut_tokens: int = 0
    """Tokens lost by cutting"""


def anchor_candidates(supervised: Bool) -> Int64:
    """Positions of one document at which a block may start, ascending.

    The drafter is served with a token that the target has just written as its anchor, and drafts the one behind it:
    both the anchor and its successor must be supervised. Position 0 has no context and never occurs in serving.
    """
    positions = np.flatnonzero(supervised[:-1] & supervised[1:])
    return positions[positions > 0]


@dataclass(frozen=True)
class Documents:
    """Tokenised documents in flat arrays; document d of the arrays is `tokens[offsets[d] : offsets[d + 1]]`."""

    tokens: Int32
    """[T] token ids"""
    supervised: Bool
    """[T] tokens under the loss"""
    offsets: Int64
    """[N + 1], of all documents in the arrays"""
    candidates: Int64
    """[N] number of anchor positions, at least 1"""
    statistics: Statistics
    content_hash: str
    numbers: Int64 | None = None
    """[N] where the documents stand in the arrays, ascending; None: these are all of them"""

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def lengths(self) -> Int64:
        """[N] tokens of each document."""
        lengths = np.diff(self.offsets)
        return lengths if self.numbers is None else lengths[self.numbers]

    def document(self, number: int) -> tuple[Int32, Bool]:
        """Token ids and supervision of one document."""
        place = self.place(number)
        span = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        return self.tokens[span], self.supervised[span]

    def place(self, number: int) -> int:
        """Where a document stands among all of the sources that can be trained on."""
        return number if self.numbers is None else int(self.numbers[number])

    def part(self, numbers: Int64, content_hash: str) -> Documents:
        """Some of these documents, which are all of the arrays, in the same arrays."""
        lengths = self.lengths[numbers]
        part = replace(self, candidates=self.candidates[numbers], content_hash=content_hash, numbers=numbers)
        supervised = sum(int(part.document(number)[1].sum()) for number in range(len(numbers)))
        statistics = replace(self.statistics, documents=len(numbers), tokens=int(lengths.sum()), supervised=supervised)
        return replace(part, statistics=statistics)

    @classmethod
    def from_lists(
        cls, documents: Iterable[tuple[Sequence[int], Sequence[bool]]], max_length: int | None = None
    ) -> Documents:
        """Documents in memory from (token ids, supervision) pairs; longer ones lose what is behind `max_length`."""
        kept = _Selection(max_length)
        tokens: list[Int32] = []
        supervised: list[Bool] = []
        for ids, flags in documents:
            pair = kept.select(np.asarray(ids, np.int32), np.asarray(flags, np.bool_))
            if pair is not None:
                tokens.append(pair[0])
                supervised.append(pair[1])
        flat_tokens = np.concatenate([np.empty(0, np.int32), *tokens])
        flat_supervised = np.concatenate([np.empty(0, np.bool_), *supervised])
        digest = hashlib.sha256()
        for array in (flat_tokens, flat_supervised, np.asarray(kept.lengths, np.int64)):
            digest.update(array.tobytes())
        return cls(
            flat_tokens, flat_supervised, kept.offsets(), kept.counts(), kept.statistics(), digest.hexdigest()[:32]
        )

    @classmethod
    def open(cls, folder: Path) -> Documents:
        """Map the documents that a `DocumentWriter` left in `folder`.

        Raises:
            DataError: the folder is damaged.
        """
        try:
            return cls._map(folder)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DataError(
                f"the tokenised documents in {folder} are damaged ({str(error).splitlines()[0]}): "
                "delete this folder, and they are made anew"
            ) from error

    @classmethod
    def _map(cls, folder: Path) -> Documents:
        header = json.loads((folder / "documents.json").read_text())
        statistics = Statistics(**header["statistics"])
        for name, size in (("tokens.i32", 4 * statistics.tokens), ("supervised.b1", statistics.tokens)):
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} has not {size} bytes")
        offsets, candidates = np.load(folder / "offsets.npy"), np.load(folder / "candidates.npy")
        if not len(offsets) - 1 == len(candidates) == statistics.documents or offsets[-1] != statistics.tokens:
            raise ValueError("its parts do not fit together")
        empty = statistics.tokens == 0  # an empty file cannot be mapped
        tokens = np.empty(0, np.int32) if empty else np.memmap(folder / "tokens.i32", np.int32, "r")
        supervised = np.empty(0, np.bool_) if empty else np.memmap(folder / "supervised.b1", np.bool_, "r")
        return cls(
            tokens,
            supervised,
            offsets,
            candidates,
            statistics,
            header["content_hash"],
        )


class DocumentWriter:
    """Streams documents into a folder that `Documents.open` maps; `close` completes it."""

    def __init__(self, folder: Path, max_length: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tokens: BinaryIO = (folder / "tokens.i32").open("wb")
        self._supervised: BinaryIO = (folder / "supervised.b1").open("wb")
        self._kept = _Selection(max_length)

    def add(self, ids: Int32, supervised: Bool, faults: Iterable[str] = ()) -> None:
        """Append one document, cut at the greatest length; one without an anchor position is only counted.

        `faults` are those fields of the statistics under which it is counted too.
        """
        self._kept.faults.update(faults)
        pair = self._kept.select(ids, supervised)
        if pair is not None:
            self._tokens.write(pair[0].tobytes())
            self._supervised.write(pair[1].tobytes())

    def close(self, content_hash: str) -> Statistics:
        """Write the index and return what became of the records."""
        statistics = self._kept.statistics()
        self._tokens.close()
        self._supervised.close()
        np.save(self._folder / "offsets.npy", self._kept.offsets())
        np.save(self._folder / "candidates.npy", self._kept.counts())
        header = {"content_hash": content_hash, "statistics": asdict(statistics)}
        (self._folder / "documents.json").write_text(json.dumps(header, indent=1))
        for path in self._folder.iterdir():  # a rename may reach the disk before what it names
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return statistics


class _Selection:
    """Cuts documents, leaves out those without an anchor position, and counts both."""

    def __init__(self, max_length: int | None) -> None:
        self._max_length = max_length
        self.lengths: list[int] = []
        self._candidates: list[int] = []
        self.faults: Counter[str] = Counter()
        self._records = self._unanchored = self._cut = self._supervised = self._cut_tokens = 0

    def select(self, ids: Int32, supervised: Bool) -> tuple[Int32, Bool] | None:
        if ids.shape != supervised.shape:
            raise DataError(f"a document has {len(ids)} tokens but {len(supervised)} supervision flags")
        self._records += 1
        surplus = 0 if self._max_length is None else max(0, len(ids) - self._max_length)
        if surplus:
            ids, supervised = ids[: self._max_length], supervised[: self._max_length]
        count = len(anchor_candidates(supervised))
        if not count:
            self._unanchored += 1
            return None
        self.lengths.append(len(ids))
        self._candidates.append(count)
        self._cut += bool(surplus)
        self._cut_tokens += surplus
        self._supervised += int(supervised.sum())
        return ids, supervised

    def offsets(self) -> Int64:
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64)

    def counts(self) -> Int64:
        return np.asarray(self._candidates, np.int64)

    def statistics(self) -> Statistics:
        return Statistics(
            records=self._records,
            documents=len(self.lengths),
            unanchored=self._unanchored,
            cut=self._cut,
            tokens=sum(self.lengths),
            supervised=self._supervised,
            cut_tokens=self._cut_tokens,
            **self.faults,
        )
