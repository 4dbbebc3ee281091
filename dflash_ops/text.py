"""Makes foreign text safe to print, and words sizes, ages and times.

Log lines, error messages and file names come from a machine that may be hostile or merely noisy. Everything that is
printed passes through `visible` first: colours are dropped, every other control character is spelled out.
"""

from __future__ import annotations

import math
import os
import re
from datetime import UTC, datetime

# Select Graphic Rendition only: colours and weights. Any other escape (titles, cursor, clipboard, queries that make
# the terminal type an answer) is spelled out below.
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
# C0 but tab, DEL, C1, soft line breaks, direction overrides and zero-width marks that hide or reorder text, lone
# surrogates (they cannot be encoded again).
_HIDDEN = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def _spelled(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str, limit: int | None = None) -> str:
    """One line of foreign text, safe to print.

    Args:
        text: a line; a newline inside it is spelled out as well.
        limit: cut to this many characters, marked by an ellipsis.
    """
    safe = _HIDDEN.sub(_spelled, _COLOUR.sub("", text))
    if limit is not None and len(safe) > limit:
        return safe[: limit - 1] + "…"
    return safe


def fitted(text: str, cells: int) -> str:
    """As much of a line as fits into so many columns of a terminal, on which a CJK character takes two."""
    text = text.expandtabs()
    if text.isascii():
        return text[:cells]
    from rich.cells import get_character_cell_size

    for index, letter in enumerate(text):
        cells -= get_character_cell_size(letter)
        if cells < 0:
            return text[:index]
    return text


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor, as that of Emacs' shell or of some CI."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def decoded(data: bytes) -> str:
    """Bytes of a log as text; what is not UTF-8 is spelled out (`\\xff`)."""
    return data.decode("utf-8", "backslashreplace")


def age(seconds: float) -> str:
    """A duration in at most two units: `41s`, `12m`, `3h 12m`, `2d 4h`; `?` for what is no number."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days}d {hours}h" if hours else f"{days}d"
    if hours:
        return f"{hours}h {minutes}m" if minutes else f"{hours}h"
    if minutes:
        return f"{minutes}m"
    return f"{whole}s"


def counted(count: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def size(count: float) -> str:
    """A number of bytes in binary units: `812 B`, `1.4 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def rfc3339(epoch: float) -> str:
    """A moment in UTC with milliseconds, as the trainer's log writes it."""
    moment = datetime.fromtimestamp(epoch, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
