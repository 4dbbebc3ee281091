"""Finds the files that `data.sources` names, and reads their records: JSON lines, JSON arrays, or Parquet rows."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from trainer.data.documents import DataError
from trainer.hub import fetch
from trainer.inputs import DATA_ENDINGS, is_hub_data

_ENDINGS = f"{', '.join(DATA_ENDINGS[:-1])} or {DATA_ENDINGS[-1]}"


def find_files(sources: Sequence[Path]) -> list[Path]:
    """The files that sources name, in their order: files, folders, patterns, and data sets on the hub.

    Of a folder, all files of records at any depth count, in the order of their names; of a data set on the hub, those
    with "train" in their names, or all where no name holds it.

    Raises:
        DataError: a source names no file.
        InputError: the hub does not have it.
    """
    files: list[Path] = []
    for source in sources:
        found = _find(source)
        if not found:
            raise DataError(f"source {source} names no file that ends in {_ENDINGS}")
        files += found
    return files


def _find(source: Path) -> list[Path]:
    if source.is_dir():
        return _records_in(source)
    if not source.exists() and has_magic(str(source)):
        found = sorted(Path(path) for path in glob(str(source), recursive=True))  # noqa: PTH207 - may be absolute
        if found or not is_hub_data(source):
            return [path for path in found if path.is_file() and path.name.endswith(DATA_ENDINGS)]
    if not is_hub_data(source):
        return [source]
    name, inside = str(Path(*source.parts[:2])), Path(*source.parts[2:])
    if source.parts[2:]:
        folder = fetch("data.sources", source, name, "dataset", [str(inside), f"{inside}/*"])
        return [path for path in _records_in(folder) if _lies_in(path.relative_to(folder), inside)]
    folder = fetch("data.sources", source, name, "dataset", [f"*{ending}" for ending in DATA_ENDINGS])
    found = _records_in(folder)
    return [path for path in found if "train" in str(path.relative_to(folder))] or found


def _lies_in(path: Path, pattern: Path) -> bool:
    return fnmatch(str(path), str(pattern)) or fnmatch(str(path), f"{pattern}/*")


def _records_in(folder: Path) -> list[Path]:
    """Files of records at any depth; hidden ones, such as the cache of tokens, do not count."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.name.endswith(DATA_ENDINGS)
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def read_fields(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of a file with where they stand ("train.jsonl line 7"); JSON may be gzipped, blank lines are skipped.

    Raises:
        DataError: no such file, an unknown kind of file, a damaged file, or a damaged record.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.name.endswith((".json", ".json.gz")):
        yield from _read_json(path)
    else:
        yield from _read_jsonl(path)


def count_records(path: Path) -> int:
    """How many records a file holds, about: blank lines count.

    Raises:
        DataError: as `read_fields`.
    """
    if path.name.endswith((".json", ".json.gz")):
        return sum(1 for _ in _read_json(path))
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
    if not path.name.endswith(DATA_ENDINGS):
        raise DataError(f"source {path} must end in {_ENDINGS}")
    with readable(path), gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of a JSON array; files of JSON lines are called .json too."""
    content = b"".join(_lines(path))
    if not content.lstrip().startswith(b"["):
        yield from _read_jsonl(path)
        return
    try:
        records = json.loads(content)
    except ValueError as error:
        raise DataError(f"source {path} is not JSON: {error}") from error
    except RecursionError:
        raise DataError(f"source {path} is nested too deeply") from None
    for number, fields in enumerate(records, 1):
        yield _checked(f"{path.name} record {number}", fields, content)


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        except RecursionError:
            raise DataError(f"{where} is nested too deeply") from None
        yield _checked(where, fields, line)


def _checked(where: str, fields: Any, written: bytes) -> tuple[str, dict[str, Any]]:
    """A record that `written` holds."""
    if not isinstance(fields, dict):
        raise DataError(f"{where} must be an object, not {type(fields).__name__}")
    if b"\\ud" in written.lower():
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON may hold it, but no tokenizer and no other file
            raise DataError(f"{where} holds half of a surrogate pair, which is no text") from None
    return where, fields


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with readable(path), path.open("rb") as file:
        for batch in ParquetFile(file).iter_batches(1024):
            for fields in batch.to_pylist():
                number += 1
                yield f"{path.name} row {number}", fields
