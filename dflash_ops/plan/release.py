"""Packs the code that a run executes: the files of one folder, named by the hash of their contents."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.errors import ConfigurationError
from dflash_ops.plan.source import choose
from dflash_ops.remote.protocol import StoredFile

CHUNK = 256 * 1024


@dataclass(frozen=True, slots=True)
class ReleaseFile:
    """One file, by its path in the package folder."""

    path: str
    size: int
    sha256: str
    executable: bool
    private: bool = False  # not readable by everyone


@dataclass(frozen=True, slots=True)
class Release:
    """A folder as it is shipped; a package goes to `releases/<name>/trainer/`."""

    source: Path
    files: tuple[ReleaseFile, ...]
    name: str  # 32 hex digits of the hash over all paths, modes and contents
    hidden: tuple[str, ...] = ()  # left out because their names begin with a dot; folders end in `/`
    ignored: tuple[str, ...] = ()  # left out by git's rules

    @property
    def total_bytes(self) -> int:
        """Size of all contents."""
        return sum(file.size for file in self.files)

    def manifest(self) -> list[StoredFile]:
        """What the container checks the contents against."""
        return [
            {
                "path": file.path,
                "size": file.size,
                "sha256": file.sha256,
                "executable": file.executable,
                "private": file.private,
            }
            for file in self.files
        ]

    def document(self) -> dict[str, Any]:
        """What is shipped and what is left out, for --dry-run --json."""
        return {"files": self.manifest(), "hidden": list(self.hidden), "ignored": list(self.ignored)}

    def contents(self, progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
        """All contents in the manifest's order. Raises ConfigurationError when a file changed meanwhile."""
        for file in self.files:
            digest = hashlib.sha256()
            sent = 0
            with (self.source / file.path).open("rb") as stream:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
                    sent += len(chunk)
                    yield chunk
                    if progress is not None:
                        progress(len(chunk))
            if sent != file.size or digest.hexdigest() != file.sha256:
                raise ConfigurationError(f"{self.source / file.path} changed while it was sent", "launch again")


def trainer_source() -> Path:
    """The folder of the trainer package that stands beside dflash. Raises ConfigurationError."""
    spec = importlib.util.find_spec("trainer")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError("the trainer package is not installed here", "name its folder by `source:` of the job")
    return Path(next(iter(spec.submodule_search_locations)))


def pack(source: Path, include: Sequence[str] = ()) -> Release:
    """Read a package folder. Raises ConfigurationError for what cannot be shipped as it is."""
    if not (source / "__main__.py").is_file():
        raise ConfigurationError(f"{source} is no package that can be run: it has no __main__.py", "correct `source`")
    try:
        chosen = choose(source, include)
        files = [_describe(source, path) for path in chosen.sizes]
    except OSError as error:
        raise ConfigurationError(f"cannot read {error.filename or source}: {error.strerror}", "see to it") from error
    if "__main__.py" not in chosen.sizes:
        raise ConfigurationError(f"git ignores __main__.py of {source}", "name it in `include` of the job")
    return _named(source, files, tuple(chosen.hidden), tuple(chosen.ignored))


def pack_wheels(folder: Path) -> Release:
    """The wheels in a folder, as they are shipped to `wheels/<name>/wheels/`."""
    return _named(folder, [_describe(folder, path.name) for path in folder.glob("*.whl")])


def _describe(source: Path, relative: str) -> ReleaseFile:
    path = source / relative
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        status = os.fstat(stream.fileno())
    executable, private = bool(status.st_mode & 0o100), not status.st_mode & 0o004
    return ReleaseFile(relative, status.st_size, digest, executable, private)


def _named(
    source: Path, files: list[ReleaseFile], hidden: tuple[str, ...] = (), ignored: tuple[str, ...] = ()
) -> Release:
    files.sort(key=lambda file: file.path)
    return Release(source, tuple(files), release_name(files), hidden, ignored)


def release_name(files: list[ReleaseFile]) -> str:
    """The name that these contents have; `dflash_ops.remote.store` computes it in the same way."""
    digest = hashlib.sha256()
    for file in files:
        mode = file.executable + 2 * file.private
        digest.update(f"{file.sha256} {mode} {file.size} {file.path}\n".encode())
    return digest.hexdigest()[:32]
