"""Keeps what was measured on a GPU: one JSON file for each commit, compared with the newest earlier one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
WORSE = 0.05
"""A figure that is worse than the earlier one by more than this share is named"""


@dataclass(frozen=True)
class Figure:
    """One number that was measured."""

    value: float
    unit: str
    better: Literal["lower", "higher"]

    def worse_than(self, earlier: Figure) -> float:
        """By which share of the earlier value this one is worse; negative where it is better."""
        if not earlier.value:
            return 0.0
        change = self.value / earlier.value - 1
        return change if self.better == "lower" else -change


@dataclass
class Record:
    """All that one commit showed on one machine."""

    date: str
    commit: str
    dirty: bool | None
    """None: not known, the working tree came without its history"""
    trainer: str
    """Hash over the files of trainer/, see `trainer_hash`"""
    machine: dict[str, Any]
    figures: dict[str, Figure] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    """What a worker did not get of what was asked, wherever it was measured"""
    not_run: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    """What each part said, whole"""

    def path(self) -> Path:
        """Where the record lies."""
        return RESULTS / f"{self.date}-{self.commit[:12]}.json"

    def write(self) -> Path:
        """Write the record, in place of an earlier one of the same day and commit."""
        RESULTS.mkdir(exist_ok=True)
        self.path().write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")
        return self.path()

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record of a file."""
        document = json.loads(path.read_text())
        document["figures"] = {name: Figure(**figure) for name, figure in document["figures"].items()}
        return cls(**document)

    def add(self, name: str, value: float | None, unit: str, better: Literal["lower", "higher"]) -> None:
        """Add a figure; None is not a figure."""
        if value is not None:
            self.figures[name] = Figure(round(float(value), 4), unit, better)

    def compared_with(self, earlier: Record) -> list[str]:
        """A line for each figure that is worse than the earlier one by more than `WORSE`."""
        lines = []
        for name, figure in self.figures.items():
            before = earlier.figures.get(name)
            if before is not None and (share := figure.worse_than(before)) > WORSE:
                lines.append(
                    f"{name}: {figure.value:g} {figure.unit}, {100 * share:.0f} % worse than {before.value:g} "
                    f"at {earlier.commit[:12]}"
                )
        return lines


def newest(*, of: str = "", other_than: str = "") -> Record | None:
    """The newest record, of this commit or of another one than that; by when it was begun."""
    records = [Record.read(path) for path in RESULTS.glob("20*.json")]
    asked = [record for record in records if (not of or record.commit == of) and record.commit != other_than]
    return max(asked, key=lambda record: (record.date, record.machine.get("written", "")), default=None)


def trainer_hash() -> str:
    """Hash over the names and contents of trainer/'s Python files: whether a record is of the code that stands here."""
    folder = REPOSITORY / "trainer"
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def fallbacks(where: str, reports: list[Mapping[str, Any]]) -> list[str]:
    """What the workers of these compile reports did not get although nobody chose so."""
    return [
        f"{where}: {report['worker']}: {report['note']}"
        for report in reports
        if report.get("note") and not report.get("allowed_by")
    ]
