"""Adds entries to inventory.yaml and leaves every byte that stands there as it is."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_ops.errors import ConfigurationError, DflashError, Exit
from dflash_ops.inventory.load import load_inventory

SECTIONS = ("hosts", "containers", "environments")


@dataclass(frozen=True)
class Addition:
    """One entry: its section, name and keys, with a comment for each key and for the entry itself (key `""`)."""

    section: str
    name: str
    values: dict[str, Any]
    comments: dict[str, str]
    commented_out: bool = False  # written as a comment, for people to switch on

    def block(self, indent: int) -> str:
        """Its lines in a mapping whose keys stand at this column."""
        head = f"{scalar(self.name)}:"
        lines = [_with_comment(" " * indent + head, self.comments.get(""))]
        for key, value in self.values.items():
            lines.append(_with_comment(f"{' ' * indent}  {key}: {scalar(value)}", self.comments.get(key)))
        if self.commented_out:
            lines = [f"{' ' * indent}# {line[indent:]}" for line in lines]
        return "".join(f"{line}\n" for line in lines)

    def stands_in(self, text: str) -> bool:
        """Whether it is there already as a comment."""
        lines = {line.strip() for line in text.splitlines()}
        return all(line.strip() in lines for line in self.block(0).splitlines()[1:])

    def flow(self) -> str:
        """The same in one line, for a mapping that is written in braces."""
        inner = ", ".join(f"{key}: {scalar(value)}" for key, value in self.values.items())
        return f"{scalar(self.name)}: {{{inner}}}"


def _with_comment(line: str, comment: str | None) -> str:
    return f"{line:<28} # {comment}" if comment else line


def scalar(value: Any) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def new_text(additions: list[Addition], default_container: str, head: str, tail: str) -> str:
    """A whole inventory of these entries; `head` and `tail` are comments."""
    parts = [head, f"default_container: {scalar(default_container)}\n"]
    for section in SECTIONS:
        blocks = [each.block(2) for each in additions if each.section == section]
        if blocks:
            parts.append(f"\n{section}:\n" + "".join(blocks))
    return "".join(parts) + tail


def extended(text: str, additions: list[Addition], top: list[str]) -> str:
    """The text with entries in their sections and lines `top` at its end. Raises ConfigurationError.

    Where a section is a block, entries come after its last one, before the comments of what follows.
    """
    for section in SECTIONS:
        mine = [each for each in additions if each.section == section]
        if mine:
            text = _with_section(text, section, mine)
    if top:
        text = _ended(text) + "".join(f"{line}\n" for line in top)
    return text


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else text + "\n"


def _with_section(text: str, section: str, additions: list[Addition]) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigurationError("the inventory is written in braces, where nothing can be added", "write it in lines")
    value = next((value for key, value in root.value if key.value == section), None)
    if value is None:
        block = "".join(each.block(2) for each in additions)
        return f"{_ended(text)}\n{section}:\n{block}"
    assert isinstance(value, yaml.MappingNode)  # the inventory was read
    if value.flow_style:
        inside = value.start_mark.index + 1
        kept = [each.flow() for each in additions if not each.commented_out]
        return text[:inside] + ", ".join(kept) + (", " if value.value and kept else "") + text[inside:]
    indent = value.value[0][0].start_mark.column
    end = _end_of_block(text, value.end_mark.index, indent)
    block = "".join(each.block(indent) for each in additions)
    return _ended(text[:end]) + block + text[end:]


def _end_of_block(text: str, end: int, indent: int) -> int:
    """Where the block's last line ends: without blank lines, and comments that stand further left, after it."""
    end = len(text) if end >= len(text) else text.rfind("\n", 0, end) + 1
    while end:
        begin = text.rfind("\n", 0, end - 1) + 1
        line = text[begin:end]
        column = len(line) - len(line.lstrip())
        if line.strip() and not (line.lstrip().startswith("#") and column < indent):
            return end
        end = begin
    return end


def write(path: Path, text: str, additions: list[Addition]) -> None:
    """Put the text in place whole, once it was read back: it must say what the file said before, and the additions.

    Raises DflashError, whose lines are the additions, when it does not.
    """
    place = path.resolve()
    before = load_inventory(path).model_dump() if place.exists() else None
    temporary = place.with_name(f".{place.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        if before is not None:
            temporary.chmod(place.stat().st_mode & 0o777)
        try:
            after = load_inventory(temporary).model_dump()
        except ConfigurationError as error:
            raise _by_hand(path, additions, error.message) from error
        was = {} if before is None else {section: before[section] for section in (*SECTIONS, "jobs")}
        kept = all(after[section].get(name) == entry for section, names in was.items() for name, entry in names.items())
        if not kept or any(each.name not in after[each.section] for each in additions if not each.commented_out):
            raise _by_hand(path, additions, "")
        temporary.replace(place)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", "name another by --inventory") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _by_hand(path: Path, additions: list[Addition], detail: str) -> DflashError:
    lines = [line for each in additions for line in (f"{each.section}:", *each.block(2).splitlines())]
    message = f"nothing can be added to {path} without changing what stands there"
    return DflashError(Exit.CONFIGURATION, message, "add the lines above by hand", detail=detail, lines=lines)
