"""What is written in a source file? JSONL or Parquet records of chats, raw text or token ids."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.data.documents import DataError


def read_fields(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of a file with where they stand ("train.jsonl line 7"); JSONL may be gzipped, blank lines are skipped.

    Raises:
        DataError: no such file, an unknown kind of file, a damaged file, or a damaged record.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        yield from _read_jsonl(path)


def count_records(path: Path) -> int:
    """How many records a file holds, about: blank lines count.

    Raises:
        DataError: as `read_fields`.
    """
    if path.suffix != ".parquet":
        return sum(1 for _ in _lines(path))
    from pyarrow.parquet import read_metadata

    with readable(path):
        return int(read_metadata(path).num_rows)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Tell in one sentence what is wrong with a file that is read inside.

    Raises:
        DataError: it is not there, damaged, or cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"source {path} does not exist") from None
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:  # the first is what pyarrow raises
        raise DataError(f"source {path} is damaged: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise DataError(f"source {path} cannot be read: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[bytes]:
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise DataError(f"source {path} must end in .jsonl, .jsonl.gz or .parquet")
    with readable(path), gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            fields = json.loads(line)
            if b"\\ud" in line.lower():
                json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON may hold it, but no tokenizer and no other file
            raise DataError(f"{where} holds half of a surrogate pair, which is no text") from None
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        except RecursionError:
            raise DataError(f"{where} is nested too deeply") from None
        if not isinstance(fields, dict):
            raise DataError(f"{where} must be an object, not {type(fields).__name__}")
        yield where, fields


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with readable(path), path.open("rb") as file:
        for batch in ParquetFile(file).iter_batches(1024):
            for fields in batch.to_pylist():
                number += 1
                yield f"{path.name} row {number}", fields
