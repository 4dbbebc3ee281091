"""Records calls and answers from a script, so that verbs are tested without a container."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.errors import DflashError
from dflash_ops.transport.base import Frame, Program, Reply

Answer = dict[str, Any] | DflashError


@dataclass(frozen=True)
class Call:
    """One program that was asked for."""

    verb: str
    request: dict[str, Any]
    payload: bytes


@dataclass
class FakeTransport:
    """`script[verb]` holds the answers for a verb, one per call, in order.

    An answer is a result value or an error to raise, or a list of event values that ends with one of these.
    """

    script: dict[str, list[Answer | list[Answer]]]
    calls: list[Call] = field(default_factory=list)
    round_trips: int = 0
    closed: bool = False

    def run(
        self,
        program: Program,
        request: Mapping[str, object],
        payload: Iterable[bytes] | None = None,
        deadline: float = 60.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> Reply:
        """See Transport.run."""
        if meanwhile is not None:
            meanwhile()
        *events, last = self._answer(program, request, b"".join(payload or ()))
        return Reply(last.value, events)

    def stream(
        self,
        program: Program,
        request: Mapping[str, object],
        deadline_between_frames: float = 30.0,
        payload: Iterable[bytes] | None = None,
    ) -> Iterator[Frame]:
        """See Transport.stream."""
        yield from self._answer(program, request, b"".join(payload or ()))

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def _answer(self, program: Program, request: Mapping[str, object], payload: bytes) -> Iterator[Frame]:
        self.round_trips += 1
        self.calls.append(Call(program.verb, dict(request), payload))
        answers = self.script.get(program.verb, [])
        assert answers, f"the script has no answer left for `{program.verb}`"
        answer = answers.pop(0)
        *events, last = answer if isinstance(answer, list) else [answer]
        for event in events:
            assert isinstance(event, dict)
            yield Frame("event", event)
        if isinstance(last, DflashError):
            raise last
        yield Frame("result", last)
