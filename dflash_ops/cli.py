"""What can be typed: options in, a rendered answer out. No logic here, and nothing heavy imported at the top."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dflash_ops.errors import DflashError, Exit

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dflash_ops.session import Session

app = typer.Typer(
    name="dflash",
    help="Launch, watch and control DFlash training runs in an LXC container.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Common:
    """Options of the whole command line; they may stand before the verb."""

    debug = False
    inventory: Path | None = None
    json = False  # set by a verb's --json, so that errors are JSON as well


@app.callback()
def _common(
    inventory: Annotated[
        Path | None, typer.Option("--inventory", help="Default: $DFLASH_INVENTORY, ./inventory.yaml")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and what remote programs said")] = False,
) -> None:
    Common.inventory = inventory
    Common.debug = debug


TargetOption = Annotated[str | None, typer.Option("--target", "-t", help="Target of the inventory", metavar="NAME")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there")]


def session(target: str | None, *, json: bool = False) -> Session:
    """The session of a verb, from the inventory that the options name."""
    from dflash_ops.inventory import load_inventory
    from dflash_ops.session import open_session

    Common.json = json
    return open_session(load_inventory(Common.inventory), target)


def show(model: BaseModel, *, json: bool, render: Callable[[Any], None]) -> None:
    """Print an answer: the model as JSON, or as `render` shows it."""
    if json:
        print(model.model_dump_json(indent=2))
    else:
        render(model)


def _fail(error: DflashError) -> NoReturn:
    from dflash_ops.text import visible

    if Common.json:
        import json

        body = {"code": error.code, "message": error.message, "hint": error.hint}
        print(json.dumps({"schema": 1, "error": body}))
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{red}dflash: {visible(error.message)}{plain}", file=sys.stderr)
    if error.hint:
        print(f"  {visible(error.hint)}", file=sys.stderr)
    if Common.debug:
        import traceback

        traceback.print_exception(error)
        for line in error.detail.splitlines():
            print(f"  | {visible(line)}", file=sys.stderr)
    sys.exit(error.code)


def main() -> None:
    """Entry point: the one place where errors end."""
    try:
        try:
            app()
        except DflashError as error:
            _fail(error)
        except Exception as error:
            message = f"a fault in dflash itself: {type(error).__name__}: {error}"
            _fail(DflashError(Exit.INTERNAL, message, "--debug shows where"))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # `dflash … | head`: the reader has enough. Python would complain when it flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
