"""Runs `python -m trainer COMMAND`: reads the command line and hands over to the command's module.

Exit codes: 0 done, or stopped by SIGTERM after a checkpoint; 1 failed while working; 2 a command line that can't be
read; 78 an input that must be changed first (configuration, data, target, checkpoint); 130 ended by Ctrl-C, a run after
a checkpoint. Exceptions that this package defines are told in one sentence; others are faults of the program and keep
their traceback, as all do with --debug.

This module imports nothing heavy: `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from trainer.arguments import read
from trainer.config.explain import explain
from trainer.config.load import load
from trainer.run.signals import Interrupted, Signals

OK, FAILED, USAGE, CONFIGURATION = 0, 1, 2, 78

# `main(options)` of the module carries a command out and returns an exit code.
MODULES = {
    "regenerate": "trainer.commands.regenerate",
    "small-target": "trainer.commands.small_target",
    "evaluate": "trainer.commands.evaluate",
    "export": "trainer.commands.export",
    "warmup": "trainer.commands.warmup",
    "bench": "trainer.commands.bench",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and lets only --debug and faults of the program show a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    threading.current_thread().name = "main"
    configure_logging(debug)
    try:
        options = read(words)
        if options.command == "config":
            return _config(options)
        if options.command == "run":
            signals = Signals()
            from trainer.run.run import run

            return run(options.config, options.run_dir, options.set, options.resume_from, signals)
        return int(importlib.import_module(MODULES[options.command]).main(options))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug or not _told(error):
            raise
        logging.getLogger(__name__).error("%s", error)
        return CONFIGURATION


def configure_logging(debug: bool) -> None:
    """One line a record on stderr: `2026-11-30T07:20:00.123Z INFO main message`; the third word is the thread.

    Of several processes, the thread stands behind the process's rank: `1:main`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(debug))
    # `run` says in one line how it ended; the pipeline, which ends as after a failure, takes it for one.
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], Interrupted)))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for chatty in (
        "torch",
        "transformers",
        "httpx",
        "httpx2",
        "urllib3",
        "matplotlib",
        "filelock",
        "fsspec",
        "py.warnings",
    ):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # The hub's library sets its own level when it is imported, and prints each line a second time.
    os.environ.setdefault("HF_HUB_VERBOSITY", "debug" if debug else "error")


class _Formatter(logging.Formatter):
    def __init__(self, debug: bool) -> None:
        super().__init__()
        self._debug = debug
        self._process = f"{os.environ.get('RANK', '0')}:" if os.environ.get("WORLD_SIZE", "1") != "1" else ""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        thread = (record.threadName or "?").replace(" ", "-")
        text = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {self._process}{thread} {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return text
        if _told(error) and not self._debug:
            return f"{text}: {type(error).__name__}: {error}"
        return f"{text}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _told(error: BaseException) -> bool:
    """Whether the message says all that a user needs: so it is with the exceptions that this package defines."""
    return type(error).__module__.startswith("trainer.")


def _config(options: argparse.Namespace) -> int:
    if options.explain:
        print(explain())
    else:
        load(options.check, options.set)
        print(f"{options.check} is valid")
    return OK


if __name__ == "__main__":
    sys.exit(main())
