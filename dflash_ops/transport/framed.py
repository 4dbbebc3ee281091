"""Makes a transport of a command on a host: the program goes to its stdin, frames come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dflash_ops.errors import DflashError, Exit
from dflash_ops.transport import node_words
from dflash_ops.transport.base import (
    ConnectionLost,
    Deadline,
    Exchange,
    Frame,
    Host,
    Program,
    RemoteRefusal,
    Reply,
    result_of,
)
from dflash_ops.transport.framing import MAX_ANSWER, FrameDecoder
from dflash_ops.transport.program import encode

# Streams last for days; this only keeps a forgotten one from staying in the container for ever.
STREAM_LIMIT = 7 * 24 * 3600

Explain = Callable[[str, int | None], DflashError | None]


class FramedTransport:
    """Runs programs by one constant command line on a host.

    `explain(text, status)` turns what the command said (stderr and stray stdout) when no answer came into an error.
    """

    def __init__(self, host: Host, command: str, explain: Explain) -> None:
        self._host = host
        self._command = command
        self._explain = explain
        self.round_trips = 0

    def run(
        self,
        program: Program,
        request: Mapping[str, object],
        payload: Iterable[bytes] | None = None,
        deadline: float = 60.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> Reply:
        """See Transport.run."""
        events: list[Frame] = []
        stdin = encode(program, request, deadline, payload)
        frames = self._frames(program, stdin, Deadline(deadline), renew=False, meanwhile=meanwhile)
        return Reply(result_of(frames, events.append), events)

    def stream(
        self,
        program: Program,
        request: Mapping[str, object],
        deadline_between_frames: float = 30.0,
        payload: Iterable[bytes] | None = None,
    ) -> Iterator[Frame]:
        """See Transport.stream."""
        stdin = encode(program, request, STREAM_LIMIT, payload)
        return self._frames(program, stdin, Deadline(deadline_between_frames), renew=True)

    def close(self) -> None:
        """Close the host's connection."""
        self._host.close()

    def _frames(
        self,
        program: Program,
        stdin: Iterator[bytes],
        deadline: Deadline,
        *,
        renew: bool,
        meanwhile: Callable[[], object] | None = None,
    ) -> Iterator[Frame]:
        self.round_trips += 1
        exchange = self._host.exchange(self._command, stdin, deadline, keep_stdin=renew)
        decoder = FrameDecoder(None if renew else MAX_ANSWER)
        try:
            if meanwhile is not None:
                meanwhile()
            for chunk in exchange:
                for kind, value in decoder.feed(chunk):
                    if renew:
                        deadline.renew()
                    if kind == "error":
                        raise refusal(value)
                    if kind == "event":
                        yield Frame("event", value)
                    elif kind == "result":
                        yield Frame("result", value)
                        return
            raise self._silence(program, exchange, decoder)
        finally:
            exchange.close()

    def _silence(self, program: Program, exchange: Exchange, decoder: FrameDecoder) -> DflashError:
        """The command ended without a result: find out why from what it said."""
        text = (exchange.stderr + b"\n" + decoder.noise_tail).decode("utf-8", "backslashreplace")
        known = self._explain(text, exchange.status)
        if known is None and not decoder.started:
            known = node_words.explain(text, exchange.status, self._host.label)
        return known or ConnectionLost(
            f"`{program.verb}` ended in the container without an answer (exit code {exchange.status})",
            "try again; --debug shows what was said instead",
            detail=text.strip(),
        )


def refusal(value: dict[str, Any]) -> RemoteRefusal:
    """The error that a remote program framed, with every field checked."""
    code = value.get("code")
    return RemoteRefusal(
        code if isinstance(code, int) else Exit.INTERNAL,
        str(value.get("message", "the container refused without a reason")),
        str(value.get("hint", "")),
        reason=str(value.get("reason", "")),
        detail=str(value.get("detail", "")),
    )
