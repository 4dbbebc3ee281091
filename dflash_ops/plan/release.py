"""Packs the code that a run executes: the files of one folder, named by the hash of their contents."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.errors import ConfigurationError
from dflash_ops.remote.protocol import StoredFile

MAX_BYTES = 64 * 1024 * 1024
MAX_FILES = 10_000
CHUNK = 256 * 1024
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")
_SKIPPED_ENDINGS = (".pyc", ".pyo", ".swp", "~")


@dataclass(frozen=True, slots=True)
class ReleaseFile:
    """One file, by its path in the package folder."""

    path: str
    size: int
    sha256: str
    executable: bool


@dataclass(frozen=True, slots=True)
class Release:
    """A folder as it is shipped; a package goes to `releases/<name>/trainer/`."""

    source: Path
    files: tuple[ReleaseFile, ...]
    name: str  # 32 hex digits of the hash over all paths, modes and contents

    @property
    def total_bytes(self) -> int:
        """Size of all contents."""
        return sum(file.size for file in self.files)

    def manifest(self) -> list[StoredFile]:
        """What the container checks the contents against."""
        return [
            {"path": file.path, "size": file.size, "sha256": file.sha256, "executable": file.executable}
            for file in self.files
        ]

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


def pack(source: Path) -> Release:
    """Read a package folder. Raises ConfigurationError for what cannot be shipped as it is."""
    if not (source / "__main__.py").is_file():
        raise ConfigurationError(f"{source} is no package that can be run: it has no __main__.py", "correct `source`")
    files = []
    for path in _walk(source):
        relative = path.relative_to(source).as_posix()
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in relative):
            raise ConfigurationError(f"the file name {relative!r} in {source} has control characters", "rename it")
        try:
            relative.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"the file name {relative!r} in {source} is not UTF-8", "rename it") from error
        if path.is_symlink():
            raise ConfigurationError(f"{path} is a symbolic link", "put the file itself there: links are not shipped")
        files.append(_describe(source, relative))
        if len(files) > MAX_FILES or sum(file.size for file in files) > MAX_BYTES:
            raise ConfigurationError(
                f"{source} holds more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files",
                "keep data and checkpoints out of the package folder",
            )
    return _named(source, files)


def pack_wheels(folder: Path) -> Release:
    """The wheels in a folder, as they are shipped to `wheels/<name>/wheels/`."""
    return _named(folder, [_describe(folder, path.name) for path in folder.glob("*.whl")])


def _describe(source: Path, relative: str) -> ReleaseFile:
    path = source / relative
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        status = os.fstat(stream.fileno())
    return ReleaseFile(relative, status.st_size, digest, bool(status.st_mode & 0o100))


def _named(source: Path, files: list[ReleaseFile]) -> Release:
    files.sort(key=lambda file: file.path)
    return Release(source, tuple(files), release_name(files))


def release_name(files: list[ReleaseFile]) -> str:
    """The name that these contents have; `dflash_ops.remote.store` computes it in the same way."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.sha256} {int(file.executable)} {file.size} {file.path}\n".encode())
    return digest.hexdigest()[:32]


def _walk(source: Path) -> Iterator[Path]:
    """Regular files and links, without hidden ones, byte code and editor leavings."""
    for folder, folders, names in os.walk(source):
        here = Path(folder)
        for name in list(folders):
            if name.startswith(".") or name in _SKIPPED_FOLDERS:
                folders.remove(name)
            elif (here / name).is_symlink():
                yield here / name
        for name in names:
            if not name.startswith(".") and not name.endswith(_SKIPPED_ENDINGS):
                yield here / name
