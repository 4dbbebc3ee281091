"""Finds the assistant's characters by the marks (`{% generation %}`) in a chat template.

The tags are replaced by characters that occur nowhere else, and the template is rendered as any other: so the marks are
found in the text itself, whatever the template does with its blocks. transformers counts characters and maps them to
tokens by itself; some of its releases (5.18, 5.22) thereby took the next user's turn for the assistant's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BEGIN, _END = "\ue0f2", "\ue0f3"
_TAG = re.compile(r"{%(?P<left>[-+]?)\s*(?P<name>generation|endgeneration)\s*(?P<right>[-+]?)%}")

_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Marks:
    """A template whose marks come out as characters."""

    template: str

    @classmethod
    def of(cls, template: str) -> Marks | None:
        """None where the template marks nothing."""
        if _TAG.search(template) is None:
            return None
        # A block, as the tag is one: newlines around blocks are trimmed, those around expressions are not.
        return cls(
            _TAG.sub(
                lambda tag: (
                    f"{{%{tag['left']} if true %}}{{{{ '{_BEGIN if tag['name'] == 'generation' else _END}' }}}}"
                    f"{{% endif {tag['right']}%}}"
                ),
                template,
            )
        )

    def spans(self, marked: str, text: str, openers: list[str], prompts: list[int]) -> list[_Span] | None:
        """The marked characters of `text` that the target was not given; None where the marks cannot be followed.

        `marked` is what this template renders, `text` what the template without marks does. `prompts` are where the
        target began to write; `openers` are what it was given before, for turns before which the text changed since.
        """
        found = _between_marks(marked, text)
        if found is None:
            return None
        kept: list[_Span] = []
        floor = 0
        for start, end in found:
            given = [place for place in prompts if floor <= place <= end]
            if given:
                begin = max(start, min(given))
            else:
                begin = max([start, *(_behind(text, start, opener, floor) for opener in openers)])
            if begin < end:
                kept.append((begin, end))
            floor = end
        return kept


def _between_marks(marked: str, text: str) -> list[_Span] | None:
    """Spans of `text` between a begin and an end, as they stand in `marked`."""
    spans: list[_Span] = []
    begin: int | None = None
    length = 0
    for piece in re.split(f"([{_BEGIN}{_END}])", marked):
        if piece == _BEGIN and begin is None:
            begin = length
        elif piece == _END and begin is not None:
            spans.append((begin, length))
            begin = None
        elif piece in (_BEGIN, _END) or not text.startswith(piece, length):
            return None
        else:
            length += len(piece)
    return spans if length == len(text) and begin is None else None


def _behind(text: str, start: int, opener: str, floor: int) -> int:
    """`start`, moved behind an opener if the span begins inside or at it."""
    for inside in range(len(opener), -1, -1):
        place = start - inside
        if place >= floor and text.startswith(opener, place):
            return place + len(opener)
    return start
