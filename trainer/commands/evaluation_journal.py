"""Keeps the answers of an evaluation under way, so that an interrupted one goes on where it was.

Beside the output grows a file of JSON lines: first what is measured and how, then what became of each prompt. It goes
when the output is written; one of other settings is begun anew.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.drafter.decoding import Generation


class JournalError(Exception):
    """Answers that cannot be kept; the message says why."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a prompt."""

    pairs: list[tuple[Generation, Generation]]
    """For each turn that was answered: by the target alone, and with the drafter"""
    refused: str = ""
    """What the chat template said to the prompt, or to one of its later turns"""


class Journal:
    """The answers of prompts so far; held by one process at a time. Without an output, nothing is kept."""

    def __init__(self, output: Path | None, settings: Mapping[str, Any]) -> None:
        """Take up what an earlier evaluation with the same settings left behind.

        Raises:
            JournalError: the folder is not there or cannot be written, or another process has the same output.
        """
        self.found: dict[tuple[int, int], Answered] = {}
        """By number of the set and of the prompt in it"""
        self._path = output.with_name(f"{output.name}.unfinished.jsonl") if output is not None else None
        self._file: BinaryIO | None = None
        if self._path is None:
            return
        if output is not None and output.is_dir():
            raise JournalError(f"{output} is a folder: name a file in it")
        try:
            self._file = self._path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{output} is being written by another process") from None
        except OSError as error:
            raise JournalError(f"{output} cannot be written: {error.strerror}") from error
        head = json.dumps(settings, sort_keys=True).encode() + b"\n"
        whole = self._read(head)
        self._file.truncate(whole)
        if not whole:
            self._append(head)

    def _read(self, head: bytes) -> int:
        """Take up what is there under the same settings; returns where the last whole line ends."""
        assert self._file is not None
        self._file.seek(0)
        if self._file.readline() != head:
            return 0
        whole = self._file.tell()
        for line in self._file:
            try:
                record = json.loads(line if line.endswith(b"\n") else b"")
                pairs = [(Generation(**alone), Generation(**helped)) for alone, helped in record["pairs"]]
                self.found[record["set"], record["prompt"]] = Answered(pairs, record["refused"])
            except (ValueError, KeyError, TypeError):  # half written by a process that was killed
                break
            whole += len(line)
        return whole

    def write(self, number: int, prompt: int, answered: Answered) -> None:
        """Keep what became of a prompt; it survives the death of this process."""
        if self._file is not None:
            pairs = [[asdict(alone), asdict(helped)] for alone, helped in answered.pairs]
            record = {"set": number, "prompt": prompt, "refused": answered.refused, "pairs": pairs}
            self._append(json.dumps(record).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        self._file.flush()

    def finish(self) -> None:
        """Remove the file: everything stands in the output."""
        if self._path is not None and self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
