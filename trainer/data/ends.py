"""Finds the tokens that end an answer: those at which the target stops, and those that its template writes there.

A special token behind an answer may as well open the next turn (`<|user|>`), which the target never writes. So a token
ends an answer if tokenizer or generation config says so, or if the template puts it behind an answer that nothing
follows; or between turns, if it stands behind a question too and does not open the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from trainer.config.sections import TargetConfig
from trainer.inputs import hub_answers, is_hub_name

QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER = (
    "What is the capital of Peru?",
    "The capital of Peru is Lima.",
    "What is the longest river in France?",
    "The longest river in France is the Loire.",
)
TWO_TURNS = [
    {"role": role, "content": text}
    for role, text in zip(("user", "assistant") * 2, (QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER), strict=True)
]
"""A conversation that every template renders, by which a template is tried out"""


def configured_ends(target: TargetConfig) -> tuple[int, ...]:
    """The ids at which the target stops, by its generation config or else by its own config; perhaps none."""
    from transformers import GenerationConfig, PreTrainedConfig

    # transformers has no types for either.
    generation_config: Any = GenerationConfig.from_pretrained
    own_config: Any = PreTrainedConfig.get_config_dict
    options = {"local_files_only": is_hub_name(target.path) and not hub_answers()}
    try:
        ids = generation_config(target.path, **options).eos_token_id
    except (OSError, ValueError):  # there is no such file
        ids = None
    if ids is None:
        try:
            ids = own_config(target.path, **options)[0].get("eos_token_id")
        except (OSError, ValueError):  # with a GGUF file, the tokenizer alone knows
            ids = None
    return tuple([ids] if isinstance(ids, int) else ids or ())


class TurnEnds:
    """The texts that end an answer under one tokenizer and template."""

    def __init__(
        self,
        tokenizer: Any,
        ids: Iterable[int],
        render: Callable[[list[dict[str, Any]]], str | None],
        prompt: str,
    ) -> None:
        """Try a template out.

        `render` gives the text of a conversation, None where the template refuses it; `prompt` is what opens an answer.
        """
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        added_pattern = _any_of(added)
        told = {tokenizer.eos_token or "", *(tokenizer.decode([number]) for number in ids if number < len(tokenizer))}
        found = told | _behind_last_answer(render, added_pattern) | _between_turns(render, added_pattern, prompt)
        self._pattern = _any_of(found - {""})
        self._stops = _any_of(told - {""})

    def match(self, text: str, position: int) -> int | None:
        """Where the end that stands at `position`, perhaps behind blanks, is over; None: no end stands there."""
        found = self._pattern.match(text, position) if self._pattern else None
        if found is None:
            return None
        # Some write two, of which they stop at the second.
        stop = (
            self._stops.match(text, found.end()) if self._stops and not self._stops.fullmatch(found.group()) else None
        )
        return (stop or found).end()

    def search(self, text: str, start: int, end: int) -> int | None:
        """Where the last end in a span is over; None: there is none."""
        found = [match.end() for match in self._pattern.finditer(text, start, end)] if self._pattern else []
        return found[-1] if found else None


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(r"\s*(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _behind(text: str, part: str, pattern: re.Pattern[str]) -> str:
    """The token directly behind a part of a text, or nothing."""
    place = text.rfind(part)
    found = pattern.match(text, place + len(part)) if place >= 0 else None
    return found.group(1) if found else ""


def _behind_last_answer(
    render: Callable[[list[dict[str, Any]]], str | None], pattern: re.Pattern[str] | None
) -> set[str]:
    if pattern is None or (text := render(TWO_TURNS[:2])) is None:
        return set()
    token = _behind(text, ANSWER, pattern)
    opening = pattern.findall(text.partition(QUESTION)[2].partition(ANSWER)[0])
    return set() if opening and opening[-1] == token else {token}  # a template that always opens the next answer


def _between_turns(
    render: Callable[[list[dict[str, Any]]], str | None], pattern: re.Pattern[str] | None, prompt: str
) -> set[str]:
    if pattern is None or (text := render(TWO_TURNS)) is None:
        return set()
    token = _behind(text, ANSWER, pattern)
    between = text.partition(ANSWER)[2].partition(SECOND_QUESTION)[0]
    tokens = pattern.findall(between)
    closes_questions = token == _behind(text, QUESTION, pattern)
    return {token} if len(tokens) > 1 and closes_questions and token not in prompt else set()
