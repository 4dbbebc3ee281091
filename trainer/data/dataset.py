"""How do a config's sources become rows? Tokenise once, cache by content, pack.

The cache is a folder per content hash: file contents, tokenizer, template, variables and greatest length. It is built
under a lock beside its final place and renamed, so that a reader finds all of it or nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.sections import DataConfig, TargetConfig
from trainer.data.chat import ChatEncoder, RefusedChatError, read_template
from trainer.data.documents import Bool, DataError, Documents, DocumentWriter, Int32, Statistics
from trainer.data.progress import progress
from trainer.data.rows import RowSource
from trainer.data.sources import Text, Tokens, count_records, parse, read_fields, readable
from trainer.pretrained import load_tokenizer
from trainer.wording import count

_log = logging.getLogger(__name__)

_FORMAT = 2
"""To be raised when the same sources shall give other documents than before"""

_BATCH = 256
_WORTH_PROCESSES = 4096
"""Records from which on tokenising is spread over processes, each of which needs seconds to start"""

_WORTH_A_WARNING = 0.05
"""Share of the rows that is not padding"""

_Fields = tuple[str, dict[str, Any]]


class _Encoded(NamedTuple):
    """One record as tokens; `complaint` names it when the chat template failed on it."""

    ids: Int32
    supervised: Bool
    refused: bool = False
    untellable: bool = False
    complaint: str = ""


@dataclass(frozen=True)
class _Recipe:
    """What the tokens of a record depend on, beside the record; hashable and cheap to send to another process."""

    target: TargetConfig
    template: str | None
    variables: tuple[tuple[str, bool | int | float | str], ...]

    @classmethod
    def of(cls, data: DataConfig, target: TargetConfig) -> _Recipe:
        return cls(target, read_template(data), tuple(sorted(data.chat_template_kwargs.items())))


class _RecordEncoder:
    """Turns records into tokens; asks for a chat template only when a chat comes."""

    def __init__(self, recipe: _Recipe) -> None:
        self._recipe = recipe
        self.tokenizer = load_tokenizer(recipe.target)
        self._chat: ChatEncoder | None = None

    def fingerprint(self) -> str:
        """Everything about tokenizer and template that could change a token."""
        tokenizer = self.tokenizer
        inner = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
        parts = [inner, self._recipe.template or tokenizer.chat_template, self._recipe.variables]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, where: str, fields: dict[str, Any]) -> _Encoded:
        record = parse(where, fields)
        if isinstance(record, Tokens):
            if record.input_ids and not 0 <= min(record.input_ids) <= max(record.input_ids) < len(self.tokenizer):
                raise DataError(f"{where} holds token ids outside the target's {len(self.tokenizer)}")
            return _Encoded(np.asarray(record.input_ids, np.int32), np.asarray(record.loss_mask, np.bool_))
        if isinstance(record, Text):
            ids = np.asarray(self.tokenizer(record.text)["input_ids"], np.int32)
            return _Encoded(ids, np.ones(len(ids), np.bool_))
        if self._chat is None:
            self._chat = ChatEncoder(self.tokenizer, self._recipe.template, dict(self._recipe.variables))
        try:
            ids, supervised, untellable = self._chat.encode(record)
        except RefusedChatError as error:
            empty = np.empty(0, np.int32)
            return _Encoded(empty, empty.astype(np.bool_), refused=True, complaint=f"{where}: {error}")
        return _Encoded(ids, supervised, untellable=untellable, complaint=where if untellable else "")


@lru_cache(maxsize=1)
def _encoder(recipe: _Recipe) -> _RecordEncoder:
    """One per process: the pool's processes load the tokenizer once."""
    return _RecordEncoder(recipe)


def _encode_batch(recipe: _Recipe, batch: list[_Fields]) -> list[_Encoded]:
    encoder = _encoder(recipe)
    return [encoder.encode(where, fields) for where, fields in batch]


def open_rows(data: DataConfig, target: TargetConfig) -> RowSource:
    """Rows of a run; tokenises the sources where the cache does not hold them yet, and says what became of them.

    Raises:
        DataError: a source is missing or damaged, or nothing can be trained on.
        TargetError: the tokenizer cannot be loaded.
    """
    documents = open_documents(data, target)
    rows = RowSource(
        documents,
        sequence_length=data.sequence_length,
        anchors_per_row=data.anchors_per_row,
        epochs=data.epochs,
        seed=data.seed,
    )
    _log.info("%s", _describe(documents.statistics, rows))
    if rows.fill < _WORTH_A_WARNING:
        _log.warning(
            "rows are %.1f %% full, and padding costs as much as tokens: lower data.sequence_length, to about %d",
            100 * rows.fill,
            max(rows.shape.longest, math.ceil(rows.fill * data.sequence_length), 16),
        )
    return rows


def _describe(found: Statistics, rows: RowSource) -> str:
    """One line: what became of the records, and how full the rows are; what did not happen is left out."""
    text = f"{found.documents} of {count(found.records, 'record')} can be trained on: "
    text += f"{count(found.tokens, 'token')}, {found.supervised} supervised; "
    if found.unanchored:
        refused = f", of which the chat template refused {found.refused}" if found.refused else ""
        text += f"{found.unanchored} without an anchor position{refused}; "
    if found.untellable:
        text += f"{found.untellable} with an answer that the chat template hides; "
    if found.cut:
        text += f"{found.cut} cut ({count(found.cut_tokens, 'token')} lost); "
    return text + f"{count(rows.rows_per_epoch, 'row')} an epoch, {100 * rows.fill:.1f} % full"


def open_documents(data: DataConfig, target: TargetConfig) -> Documents:
    """The tokenised documents of a config, from the cache or built into it."""
    recipe = _Recipe.of(data, target)
    encoder = _RecordEncoder(recipe)
    max_length = data.max_document_length or data.sequence_length
    digest = hashlib.sha256(f"{_FORMAT} {max_length} {encoder.fingerprint()}".encode())
    for source in data.sources:
        digest.update(_hash_of(source))
    content_hash = digest.hexdigest()[:32]
    cache = data.cache_dir or data.sources[0].resolve().parent / ".dflash-cache"
    folder = cache / content_hash
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f"{content_hash}.lock"):
                if not folder.is_dir():  # another process may have built it while this one waited
                    _build(data.sources, recipe, max_length, folder, content_hash)
        except OSError as error:
            raise DataError(
                f"the tokenised documents cannot be written to {cache}: {error.strerror}; set data.cache_dir"
            ) from error
    return Documents.open(folder)


def _hash_of(source: Path) -> bytes:
    digest = hashlib.sha256()
    with (
        readable(source),
        source.open("rb") as file,
        progress(f"reading {source.name}", os.fstat(file.fileno()).st_size) as advance,
    ):
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            advance(len(chunk))
    return digest.digest()


def _build(sources: list[Path], recipe: _Recipe, max_length: int, folder: Path, content_hash: str) -> None:
    """Tokenise the sources into `folder`; the caller holds the lock."""
    building = folder.with_name(f".building-{folder.name}")
    shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
    try:
        _tokenise(sources, recipe, DocumentWriter(building, max_length), content_hash)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _tokenise(sources: list[Path], recipe: _Recipe, writer: DocumentWriter, content_hash: str) -> None:
    """Every record of the sources through the encoder into the writer, and what became of them into the log."""
    records = sum(map(count_records, sources))
    complaints: dict[str, str] = {}
    with progress("tokenising", records) as advance:
        for batch in _encode_all(chain.from_iterable(map(read_fields, sources)), recipe, records):
            for record in batch:
                writer.add(record.ids, record.supervised, refused=record.refused, untellable=record.untellable)
                if record.complaint:
                    complaints.setdefault("refused" if record.refused else "untellable", record.complaint)
            advance(len(batch))
    statistics = writer.close(content_hash)
    if statistics.refused:
        _log.warning(
            "the chat template refused %s, the first is %s", count(statistics.refused, "record"), complaints["refused"]
        )
    if statistics.untellable:
        _log.warning(
            "in %s the chat template does not show what the assistant wrote, the first is %s; these turns are not "
            "trained on",
            count(statistics.untellable, "record"),
            complaints["untellable"],
        )


def _encode_all(records: Iterator[_Fields], recipe: _Recipe, count: int) -> Iterator[list[_Encoded]]:
    """Records as tokens, in order, batch by batch; by several processes where that is worth it."""
    batches = iter(lambda: list(islice(records, _BATCH)), [])
    processes = min(len(os.sched_getaffinity(0)), 32)
    if count < _WORTH_PROCESSES or processes == 1:
        for batch in batches:
            yield _encode_batch(recipe, batch)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[list[_Encoded]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_batch, recipe, batch))
            if len(waiting) > 2 * processes:  # read no further ahead than the processes can follow
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
