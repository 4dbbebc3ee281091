"""Turns errors and signals into exit codes: the entry point of `dflash`."""

import os
import sys
from gc import freeze, set_threshold
from typing import Any

import typer

from dflash_ops.cli import CommandEnded, app
from dflash_ops.errors import DflashError, Exit, UsageError
from dflash_ops.options import Common
from dflash_ops.streams import mend_streams, no_reader

# Typer has click's exceptions under another name in each of its versions.
CLICK_USAGE: Any = typer.BadParameter.__base__


def _failed(error: DflashError) -> int:
    """Say it; its exit code."""
    try:
        _say(error)
    except BrokenPipeError:
        no_reader()
    return error.code


def _misread(error: Any) -> UsageError:
    """What click says of a command line, with the cure."""
    words = error.format_message().replace("Value error, ", "")  # pydantic's words, by which Typer checks values
    help_ = f"`{error.ctx.command_path} --help` shows what it takes" if error.ctx is not None else "see `dflash --help`"
    if words.startswith("Got unexpected extra argument") and "=" in words:
        help_ = f"give --set before each: `{error.ctx.command_path} --set a=1 --set b=2`"
    Common.json = "--json" in sys.argv
    return UsageError(words[:1].lower() + words[1:].rstrip("."), help_)


def _say(error: DflashError) -> None:
    from dflash_ops.text import visible

    if Common.json:
        import json

        body = {"code": error.code, "message": error.message, "hint": error.hint, "lines": error.lines}
        print(json.dumps({"schema": 1, "kind": "error", "error": body}))
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    for line in error.lines:
        print(f"  | {visible(line)}", file=sys.stderr)
    print(f"{red}dflash: {visible(error.message)}{plain}", file=sys.stderr)
    if error.hint:
        print(f"  {visible(error.hint)}", file=sys.stderr)
    if Common.debug:
        import traceback

        # The exceptions hold what the container said: their text, too, is made safe.
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(visible(line), file=sys.stderr)
        for line in error.detail.splitlines():
            print(f"  | {visible(line)}", file=sys.stderr)


def main() -> None:
    """Entry point: the one place where errors end."""
    # A command lives for a second. As Python comes, it would search all that was imported for garbage several times
    # meanwhile, 25 ms each, and for 100 ms more at its end.
    set_threshold(100_000)
    mend_streams()
    try:
        code = _run()
    finally:
        freeze()
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the exit code stays what it is
            no_reader()
    sys.exit(code)


def _run() -> int:
    """The exit code: one of `Exit` on every path, or that of the command that `exec` ran."""
    try:
        return Exit(app(prog_name="dflash", standalone_mode=False) or Exit.OK)
    except CommandEnded as ended:
        return ended.status
    except SystemExit as ended:  # shell completion, which exits by itself
        return Exit.OK if not ended.code else Exit.USAGE
    except DflashError as error:
        return _failed(error)
    except CLICK_USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), end="")  # the help, unless Typer has shown it already
            return Exit.USAGE
        return _failed(_misread(error))
    except Exception as error:
        message = f"a fault in dflash itself: {type(error).__name__}: {error}"
        return _failed(DflashError(Exit.INTERNAL, message, "--debug shows where"))


if __name__ == "__main__":
    main()
