"""Writes a report of runs to one HTML file, or shows it live to this machine alone.

A run's files come by the machinery of `pull`; a RUN with a `/` in it is a folder that was pulled. The live page is on
127.0.0.1 only and answers nothing but GET /: it changes nothing, so it has no token. It is refused to pages of other
sites by the name in the request's Host line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import Field, ValidationError

from dflash_ops.document import Document
from dflash_ops.errors import ConfigurationError, DflashError, UsageError
from dflash_ops.progress import Progress
from dflash_ops.run.facts import read_facts
from dflash_ops.run.probes.gpu import GpuDevices
from dflash_ops.run.record import RunSpec, check_run_name
from dflash_ops.show.report.data import GpuSample, RunData, plots, read_run
from dflash_ops.show.report.page import page
from dflash_ops.text import rfc3339
from dflash_ops.verbs.diff import compare_facts, compare_specs
from dflash_ops.verbs.pull import PullOptions, pull
from dflash_ops.verbs.session import Session
from dflash_ops.verbs.status import status

FRESH_SECONDS = 10  # between two looks of the live page
_LARGEST_FILE = 512 * 1024 * 1024
_SAMPLES = 20_000  # GPU readings that the live page keeps

Differences = list[tuple[str, str, str, str | None, str | None]]


class Reported(Document):
    """The answer of `dflash report`."""

    kind: Literal["report"] = "report"
    file: str
    size: int = Field(description="Bytes")
    runs: tuple[str, ...]
    plots: tuple[str, ...] = Field(description="Titles of the diagrams that are drawn")
    missing: tuple[str, ...] = Field(description="Those that are not, each with the reason")


def is_folder(word: str) -> bool:
    """Whether a RUN of the command line means a folder here: it holds a `/`, or is `.` or `..`."""
    return "/" in word or word in (".", "..")


def report(session: Session | None, words: list[str], to: Path | None) -> Reported:
    """Write the report of runs and folders. `session` may be None when all are folders.

    Raises RemoteRefusal for a run that does not exist, ConfigurationError for a folder without a run's files, a file
    that can't be written, or matplotlib that is not installed.
    """
    with TemporaryDirectory(prefix="dflash-report-") as kept:
        runs = [read(session, word, Path(kept)) for word in words]
    text = page(runs, differences(runs), rfc3339(time.time()))
    file = to or Path(f"report-{runs[0].name}{'' if len(runs) == 1 else f'-and-{len(runs) - 1}-more'}.html")
    try:
        unfinished = file.with_name(file.name + ".partial")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {file}: {error.strerror or error}", "name another file by --to"
        ) from error
    drawn, missing = plots(runs)
    return Reported(
        file=str(file),
        size=len(text.encode()),
        runs=tuple(run.name for run in runs),
        plots=tuple(plot.title for plot in drawn),
        missing=tuple(missing),
    )


def read(session: Session | None, word: str, kept: Path, gpu: list[GpuSample] | None = None) -> RunData:
    """A run of the container, whose files are kept in `kept` meanwhile, or a folder's."""
    if is_folder(word):
        folder = Path(word)
    else:
        if session is None:
            raise UsageError(f"{word} is a run, and no container was named", "write ./NAME for a folder")
        folder = kept / check_run_name(word)
        pull(session, PullOptions(word, "report", kept), Progress())
    files = _texts(folder)
    if not files.keys() & {"metrics.jsonl", "spec.json", "compile.json"}:
        raise ConfigurationError(
            f"{folder} holds no files of a run", "`dflash pull RUN --what all` brings them, into a folder of its name"
        )
    return read_run(folder.resolve().name, files, gpu or ())


def _texts(folder: Path) -> dict[str, str]:
    try:
        found = [*folder.glob("*.json"), folder / "metrics.jsonl"]
        return {
            path.name: path.read_text(encoding="utf-8", errors="replace")
            for path in found
            if path.is_file() and path.stat().st_size < _LARGEST_FILE
        }
    except OSError as error:
        raise ConfigurationError(f"cannot read {folder}: {error.strerror or error}") from error


def differences(runs: list[RunData]) -> Differences:
    """What each further run has that the first has not, as `dflash diff` tells it."""
    found: Differences = []
    first = runs[0]
    for other in runs[1:]:
        try:
            if first.spec is not None and other.spec is not None:
                pair = RunSpec.model_validate(first.spec), RunSpec.model_validate(other.spec)
                found += [(other.name, one.section, one.key, one.a, one.b) for one in compare_specs(*pair)]
            if first.facts is not None and other.facts is not None:
                both = read_facts(first.facts, first.name), read_facts(other.facts, other.name)
                found += [(other.name, one.section, one.key, one.a, one.b) for one in compare_facts(*both)]
        except (ValidationError, ConfigurationError):
            other.notes.append(f"its records can't be compared with those of {first.name}")
        for name in ("spec", "facts"):
            without = [run.name for run in (first, other) if getattr(run, name) is None]
            if without:
                other.notes.append(f"{name}.json is not compared: {' and '.join(without)} has none")
    return found


@dataclass
class Live:
    """The page as it is now: made anew when the last one is older than some seconds."""

    session: Session | None
    words: list[str]
    kept: Path
    clock: Callable[[], float] = time.time
    _made: float = 0.0
    _text: str = ""
    _gpu: dict[str, list[GpuSample]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def text(self) -> str:
        """The page; a failure to reach the container is said on it, above what was last seen."""
        with self._lock:
            now = self.clock()
            if self._text and now - self._made < FRESH_SECONDS / 2:
                return self._text
            try:
                self._sample()
                runs = [read(self.session, word, self.kept, self._gpu.get(word)) for word in self.words]
                self._text = page(runs, differences(runs), rfc3339(now), refresh=FRESH_SECONDS)
                self._made = now
            except DflashError as error:
                if not self._text:
                    raise
                return self._text.replace("<h1>", f"<p><b>{escape(error.message)}: this is older.</b></p><h1>", 1)
            return self._text

    def _sample(self) -> None:
        """Read the GPUs of each run that trains in the container."""
        for word in self.words:
            if self.session is None or is_folder(word):
                continue
            seen = status(self.session, word)
            if not isinstance(seen.gpu, GpuDevices) or seen.verdict.finished:
                continue
            samples = self._gpu.setdefault(word, [])
            wanted = seen.roles.all
            samples += [
                GpuSample(seen.now.epoch, one.index, one.utilization, one.power)
                for one in seen.gpu.devices
                if not wanted or one.index in wanted
            ]
            del samples[:-_SAMPLES]


def server(live: Live, port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that shows the page; port 0 takes a free one. Raises ConfigurationError if it is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):
                self._answer(403, "this page is for this machine alone")
            elif self.path != "/":
                self._answer(404, "there is nothing here; the report is at /")
            else:
                try:
                    self._answer(200, live.text())
                except DflashError as error:
                    self._answer(503, f"<p>{escape(error.message)}</p><p>{escape(error.hint)}</p>")

        def _answer(self, code: int, text: str) -> None:
            data = text.encode()
            headers: Mapping[str, str] = {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Length": str(len(data)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
            }
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Requests of one's own browser are no news."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen on 127.0.0.1:{port}: {error}", "name another by --port") from error


def serve(session: Session | None, words: list[str], port: int, say: Callable[[str], None]) -> None:
    """Show the report live until Ctrl-C. Raises what `report` raises, before it listens."""
    with TemporaryDirectory(prefix="dflash-report-") as kept:
        live = Live(session, words, Path(kept))
        live.text()
        with server(live, port) as listening:
            say(f"http://127.0.0.1:{listening.server_port}/ shows it until Ctrl-C")
            with suppress(KeyboardInterrupt):
                listening.serve_forever()
