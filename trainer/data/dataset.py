"""Makes rows of a config's sources: tokenises once, caches by content, packs.

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
from trainer.data.chat import ChatEncoder
from trainer.data.documents import Bool, DataError, Documents, DocumentWriter, Int32, Statistics
from trainer.data.ends import configured_ends
from trainer.data.held_out import split
from trainer.data.progress import progress
from trainer.data.records import Text, Tokens, UnsupportedRecordError, parse
from trainer.data.rows import RowShape, RowSource
from trainer.data.sources import count_records, find_files, read_fields, readable
from trainer.data.templates import RefusedChatError, read_template
from trainer.pretrained import load_model_config, load_tokenizer
from trainer.wording import count

_log = logging.getLogger(__name__)

_FORMAT = 3
"""To be raised when the same sources shall give other documents than before"""

_BATCH = 256
_WORTH_PROCESSES = 4096
"""Records from which on tokenising is spread over processes, each of which needs seconds to start"""

_WORTH_A_WARNING = 0.05
"""Share of the rows that is not padding"""

_Fields = tuple[str, dict[str, Any]]


class _Encoded(NamedTuple):
    """One record as tokens."""

    ids: Int32
    supervised: Bool
    faults: tuple[str, ...] = ()
    """Fields of the statistics that count it, beside how many tokens it has"""
    complaint: str = ""
    """Where the record stands, and what the template says of it; only with faults"""


_NOTHING = _Encoded(np.empty(0, np.int32), np.empty(0, np.bool_))

_NOT_IN_TOKENS = {"name_or_path", "is_local", "local_files_only", "vocab_file", "tokenizer_file", "merges_file"}
"""What a tokenizer keeps of how it was loaded"""


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
        self._ends = configured_ends(recipe.target)
        text = load_model_config(recipe.target).get_text_config()
        # Embeddings are often padded, and sometimes shorter than what was added to the tokenizer.
        self._embeddings = int(getattr(text, "vocab_size", None) or len(self.tokenizer))
        self._chat: ChatEncoder | None = None

    def fingerprint(self) -> str:
        """Everything about tokenizer and template that could change a token.

        Templates see all special tokens; what tokenizer_config.json says is hashed whole.
        """
        tokenizer = self.tokenizer
        inner = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
        settings = {key: value for key, value in tokenizer.init_kwargs.items() if key not in _NOT_IN_TOKENS}
        parts = [
            inner,
            self._recipe.template or tokenizer.chat_template,
            self._recipe.variables,
            sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()),
            sorted((key, repr(value)) for key, value in settings.items()),
            self._ends,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, where: str, fields: dict[str, Any]) -> _Encoded:
        """The tokens of a record.

        Raises:
            DataError: the record has the wrong shape, or token ids that the target has no embedding for.
        """
        try:
            encoded = self._encode(where, fields)
        except UnsupportedRecordError as error:
            return _NOTHING._replace(faults=("unsupported",), complaint=str(error))
        except RefusedChatError as error:
            return _NOTHING._replace(faults=("refused",), complaint=f"{where}: {error}")
        ids = encoded.ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._embeddings:
            raise DataError(f"{where} holds token ids outside the target's {self._embeddings}")
        return encoded

    def _encode(self, where: str, fields: dict[str, Any]) -> _Encoded:
        record = parse(where, fields)
        if isinstance(record, Tokens):
            # Wider than a token id, so that too large a number is found by its value.
            ids = np.asarray(record.input_ids, np.int64).clip(-1, 2**31 - 1).astype(np.int32)
            return _Encoded(ids, np.asarray(record.loss_mask, np.bool_))
        if isinstance(record, Text):
            ids = np.asarray(self.tokenizer(record.text)["input_ids"], np.int32)
            return _Encoded(ids, np.ones(len(ids), np.bool_))
        if self._chat is None:
            recipe = self._recipe
            self._chat = ChatEncoder(self.tokenizer, recipe.template, dict(recipe.variables), self._ends)
        chat = self._chat.encode(record)
        faults = tuple(name for name in ("untellable", "reasoning_dropped") if getattr(chat, name))
        return _Encoded(chat.ids, chat.supervised, faults, where if faults else "")


@lru_cache(maxsize=1)
def _encoder(recipe: _Recipe) -> _RecordEncoder:
    """One per process: the pool's processes load the tokenizer once."""
    return _RecordEncoder(recipe)


def _encode_batch(recipe: _Recipe, batch: list[_Fields]) -> list[_Encoded]:
    encoder = _encoder(recipe)
    return [encoder.encode(where, fields) for where, fields in batch]


class RunRows(NamedTuple):
    """The rows of a run."""

    training: RowSource
    held_out: RowSource | None
    """Of `data.held_out`; one epoch"""

    @property
    def shape(self) -> RowShape:
        """Sizes that hold for every row of both."""
        shape = self.training.shape
        return shape if self.held_out is None else shape.or_larger(self.held_out.shape)


def open_rows(data: DataConfig, target: TargetConfig) -> RunRows:
    """Rows of a run; tokenises the sources where the cache does not hold them yet, and says what became of them.

    Raises:
        DataError: a source is missing or damaged, or nothing can be trained on.
        TargetError: the tokenizer cannot be loaded.
    """
    documents, held_out = open_documents(data, target), None
    if isinstance(data.held_out, float):
        documents, held_out = split(documents, data.held_out, data.seed)
    elif data.held_out is not None:
        held_out = open_documents(data.model_copy(update={"sources": [data.held_out]}), target)
    rows = _rows(documents, data, data.epochs)
    _log.info("%s", _describe(documents.statistics, rows, divided=isinstance(data.held_out, float)))
    _warn_of_padding(rows, data)
    if held_out is None:
        return RunRows(rows, None)
    if not len(held_out):
        raise DataError(f"data.held_out: none of the records in {data.held_out} can be measured on")
    measured = _rows(held_out, data, epochs=1)
    _log.info("%s", _describe_held_out(held_out, measured, data))
    return RunRows(rows, measured)


def _rows(documents: Documents, data: DataConfig, epochs: int) -> RowSource:
    return RowSource(
        documents,
        sequence_length=data.sequence_length,
        anchors_per_row=data.anchors_per_row,
        epochs=epochs,
        seed=data.seed,
    )


def _describe_held_out(documents: Documents, rows: RowSource, data: DataConfig) -> str:
    of = "data.sources" if isinstance(data.held_out, float) else f"{data.held_out}"
    text = f"held out: {count(len(documents), 'document')} of {of}, {count(rows.total_rows, 'row')}, "
    measured = min(rows.total_rows, data.held_out_rows)
    if measured < rows.total_rows:
        text += f"of which data.held_out_rows {measured} are measured, "
    return text + f"every {count(data.held_out_every, 'step')}; rows {rows.content_hash}"


def _warn_of_padding(rows: RowSource, data: DataConfig) -> None:
    if rows.fill < _WORTH_A_WARNING:
        _log.warning(
            "rows are %.1f %% full, and padding costs as much as tokens: lower data.sequence_length, to about %d",
            100 * rows.fill,
            max(rows.shape.longest, math.ceil(rows.fill * data.sequence_length), 16),
        )


def _describe(found: Statistics, rows: RowSource, *, divided: bool) -> str:
    """One line: what became of the records, and how full the rows are; what did not happen is left out."""
    rest = " and are not held out" if divided else ""
    text = f"{found.documents} of {count(found.records, 'record')} can be trained on{rest}: "
    text += f"{count(found.tokens, 'token')}, {found.supervised} supervised; "
    if found.unanchored:
        refused = f", of which the chat template refused {found.refused}" if found.refused else ""
        unsupported = f", {found.unsupported} with more than text" if found.unsupported else ""
        text += f"{found.unanchored} without an anchor position{refused}{unsupported}; "
    if found.untellable:
        text += f"{found.untellable} with an answer that the chat template hides; "
    if found.reasoning_dropped:
        text += f"{found.reasoning_dropped} with reasoning that the chat template drops; "
    if found.cut:
        text += f"{found.cut} cut ({count(found.cut_tokens, 'token')} lost); "
    return text + f"{count(rows.rows_per_epoch, 'row')} an epoch, {100 * rows.fill:.1f} % full"


def open_documents(data: DataConfig, target: TargetConfig) -> Documents:
    """The tokenised documents of a config, from the cache or built into it."""
    recipe = _Recipe.of(data, target)
    encoder = _RecordEncoder(recipe)
    max_length = data.max_document_length or data.sequence_length
    digest = hashlib.sha256(f"{_FORMAT} {max_length} {encoder.fingerprint()}".encode())
    files = find_files(data.sources)
    for file in files:
        digest.update(_hash_of(file))
    content_hash = digest.hexdigest()[:32]
    first = data.sources[0]
    beside = first.resolve() if first.exists() else files[0].absolute()  # a pattern, or fetched from the hub
    cache = data.cache_dir or beside.parent / ".dflash-cache"
    folder = cache / content_hash
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f"{content_hash}.lock"):
                if not folder.is_dir():  # another process may have built it while this one waited
                    _build(files, recipe, max_length, folder, content_hash)
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
                writer.add(record.ids, record.supervised, record.faults)
                for fault in record.faults:
                    complaints.setdefault(fault, record.complaint)
            advance(len(batch))
    _warn(writer.close(content_hash), complaints)


def _warn(found: Statistics, complaints: dict[str, str]) -> None:
    """Say what is wrong with how many records, and name the first of each kind."""
    if found.refused:
        _log.warning(
            "the chat template refused %s, the first is %s", count(found.refused, "record"), complaints["refused"]
        )
    if found.unsupported:
        _log.warning("left out: %s, the first is %s", count(found.unsupported, "record"), complaints["unsupported"])
    if found.untellable:
        _log.warning(
            "in %s the chat template does not show what the assistant wrote, the first is %s; these turns are not "
            "trained on",
            count(found.untellable, "record"),
            complaints["untellable"],
        )
    if found.reasoning_dropped:
        _log.warning(
            "in %s the chat template drops the assistant's reasoning, the first is %s; the drafter does not learn it, "
            "though the target writes it: name a template that keeps it in data.chat_template, or give records of "
            "input_ids and loss_mask, as `trainer regenerate` writes them",
            count(found.reasoning_dropped, "record"),
            complaints["reasoning_dropped"],
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
