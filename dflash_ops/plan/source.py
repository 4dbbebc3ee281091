"""Chooses the files of a folder that are shipped: those that git does not ignore, without hidden ones.

In a git checkout git itself is asked. Elsewhere, and where git is not installed, the `.gitignore` files are read by
pathspec, which knows their patterns.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dflash_ops.errors import ConfigurationError
from dflash_ops.text import size

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_BYTES = 64 * 1024 * 1024
MAX_FILES = 10_000
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")
_SKIPPED_ENDINGS = (".pyc", ".pyo", ".swp", "~")
_OF_GIT = (".gitignore", ".gitattributes", ".gitmodules", ".gitkeep")  # nobody misses them: not named
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(slots=True)
class Chosen:
    """What is shipped, by its path in the folder, and what is left out although a person may want it."""

    sizes: dict[str, int] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def choose(source: Path, include: Sequence[str] = ()) -> Chosen:
    """The files of a folder to ship; nothing is read yet. Raises ConfigurationError for what cannot be shipped.

    Args:
        source: the folder.
        include: patterns as in `.gitignore`, for files that are shipped although they are hidden or ignored.
    """
    walk = _Walk(source, include)
    walk.enter(source, _rules(source), inherited=False)
    walk.check_include()
    chosen = walk.chosen
    if sum(chosen.sizes.values()) > MAX_BYTES:
        largest = max(chosen.sizes, key=chosen.sizes.__getitem__)
        raise ConfigurationError(
            f"{source} holds more than {MAX_BYTES >> 20} MiB; the largest file is {largest!r}, "
            f"{size(chosen.sizes[largest])}",
            "keep data and checkpoints out of the package folder, or have git ignore them",
        )
    return chosen


class _Rules(Protocol):
    """What git ignores."""

    def inside(self, folder: Path) -> _Rules:
        """The rules of a folder within."""

    def ignores(self, path: Path, kind: int) -> bool:
        """Whether a file or folder is ignored; `kind` is its S_IFMT."""


class _Walk:
    def __init__(self, source: Path, include: Sequence[str]) -> None:
        self.chosen = Chosen()
        self._source = source
        self._unused = {pattern: _spec([pattern]) for pattern in include if not pattern.startswith(("!", "#"))}
        self._include = _spec(include) if include else None

    def enter(self, folder: Path, rules: _Rules, *, inherited: bool) -> None:
        """Take a folder's files; `inherited`: it is left out, but for what `include` names."""
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if entry.name == ".git":
                continue
            path = folder / entry.name
            found = entry.stat(follow_symlinks=False)
            kind = stat.S_IFMT(found.st_mode)
            relative = path.relative_to(self._source).as_posix()
            if kind == stat.S_IFDIR:
                left_out = inherited or self._left_out(path, relative + "/", kind, rules)
                if self._include is not None or not left_out:
                    self.enter(path, rules.inside(path), inherited=left_out)
            elif self._included(relative) or not (inherited or self._left_out(path, relative, kind, rules)):
                _refuse_odd(path, relative, self._source, kind)
                self.chosen.sizes[relative] = found.st_size
                if len(self.chosen.sizes) > MAX_FILES:
                    raise ConfigurationError(
                        f"{self._source} holds more than {MAX_FILES} files",
                        "keep data and checkpoints out of the package folder, or have git ignore them",
                    )

    def check_include(self) -> None:
        """A pattern that names nothing is a slip of the pen."""
        for pattern in self._unused:
            raise ConfigurationError(f"`include` names {pattern!r}, which is not in {self._source}", "correct it")

    def _included(self, relative: str) -> bool:
        if self._include is None:
            return False
        for pattern in [each for each, spec in self._unused.items() if spec.match_file(relative)]:
            del self._unused[pattern]
        return self._include.match_file(relative)

    def _left_out(self, path: Path, relative: str, kind: int, rules: _Rules) -> bool:
        if path.name in _SKIPPED_FOLDERS if kind == stat.S_IFDIR else path.name.endswith(_SKIPPED_ENDINGS):
            return True
        if rules.ignores(path, kind):
            self.chosen.ignored.append(relative)
            return True
        if path.name.startswith("."):
            if path.name not in _OF_GIT:
                self.chosen.hidden.append(relative)
            return True
        return False


def _refuse_odd(path: Path, relative: str, source: Path, kind: int) -> None:
    """Raises ConfigurationError for what is no regular file with a name that can be sent."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in relative):
        raise ConfigurationError(f"the file name {relative!r} in {source} has control characters", "rename it")
    try:
        relative.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"the file name {relative!r} in {source} is not UTF-8", "rename it") from error
    if kind == stat.S_IFLNK:
        raise ConfigurationError(f"{path} is a symbolic link", "put the file itself there: links are not shipped")
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "no regular file")
        raise ConfigurationError(f"{path} is {what}, which cannot be shipped", "remove it, or have git ignore it")


def _rules(folder: Path) -> _Rules:
    """A checkout that ignores the folder as a whole (an environment within it, say) does not rule inside it."""
    ignored = _git(folder, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    if ignored is None:
        return _FileRules(_above(folder)).inside(folder)
    if _git(folder, "check-ignore", "--quiet", str(folder.absolute())) is not None:
        return _FileRules(()).inside(folder)
    return _GitRules(folder, frozenset(os.fsdecode(ignored).split("\0")))


def _git(folder: Path, *words: str) -> bytes | None:
    """What git says; None without git, outside a checkout, and where it says no."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, env=ours, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class _GitRules:
    """What git says of its checkout."""

    folder: Path
    ignored: frozenset[str]  # relative to the folder; folders end in `/`, and are not listed further

    def inside(self, folder: Path) -> _Rules:
        return _rules(folder) if (folder / ".git").exists() else self  # a submodule, or another checkout

    def ignores(self, path: Path, kind: int) -> bool:
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):  # git lists no others
            return _git(self.folder, "check-ignore", "--quiet", str(path.absolute())) is not None
        return path.relative_to(self.folder).as_posix() + "/" * (kind == stat.S_IFDIR) in self.ignored


@dataclass(frozen=True, slots=True)
class _FileRules:
    """What `.gitignore` files say; the last word is that of the innermost one."""

    specs: tuple[tuple[Path, GitIgnoreSpec], ...]

    def inside(self, folder: Path) -> _FileRules:
        return _FileRules((*self.specs, *_read(folder)))

    def ignores(self, path: Path, kind: int) -> bool:
        for folder, spec in reversed(self.specs):
            relative = path.relative_to(folder).as_posix() + "/" * (kind == stat.S_IFDIR)
            said = spec.check_file(relative).include
            if said is not None:
                return said
        return False


def _above(folder: Path) -> tuple[tuple[Path, GitIgnoreSpec], ...]:
    """The `.gitignore` files of the checkout that holds the folder, when git could not be asked."""
    whole = folder.absolute()
    top = next((parent for parent in (whole, *whole.parents) if (parent / ".git").exists()), whole)
    between = [parent for parent in reversed(whole.parents) if parent.is_relative_to(top)]
    specs = tuple(each for parent in between for each in _read(parent))
    return () if _FileRules(specs).ignores(whole, stat.S_IFDIR) else specs


def _read(folder: Path) -> Iterator[tuple[Path, GitIgnoreSpec]]:
    try:
        lines = (folder / ".gitignore").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    yield folder, _spec(lines)


def _spec(patterns: Sequence[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(patterns)
