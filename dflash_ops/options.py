"""Holds the options that commands share, completion, and how a command gets its session and shows its answer.

Annotations are evaluated here, not kept as text: Typer would compile those of every command each time.
"""

import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash_ops.errors import DflashError, Exit, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dflash_ops.verbs.session import Session


class Common:
    """Options of the whole command line; they may stand before the verb."""

    debug = False
    inventory: Path | None = None
    json = False  # set by a verb's --json, so that errors are JSON as well
    session: "Session | None" = None  # the verb's, which knows what Ctrl-C leaves behind
    so_far = "nothing was changed"  # by a verb without one


def known(what: Literal["containers", "jobs", "hosts", "environments"]) -> Callable[[str], list[str]]:
    """Completes names of the inventory. Completion never fails and never connects."""

    def complete(incomplete: str) -> list[str]:
        from dflash_ops.inventory.load import load_inventory

        try:
            names = getattr(load_inventory(Common.inventory), what)
        except DflashError:
            return []
        return [name for name in names if name.startswith(incomplete)]

    return complete


def known_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Completes runs of the container that this machine has seen."""
    from dflash_ops.inventory.load import load_inventory
    from dflash_ops.run.last_known import names

    try:
        inventory = load_inventory(Common.inventory)
        container, _ = inventory.container(context.params.get("container"))
    except DflashError:
        return []
    return [name for name in names(inventory.path, container) if name.startswith(incomplete)]


def finite(value: float | None) -> float | None:
    """Refuses `nan` and `inf`, which click takes for numbers: nothing would ever end."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter("it must be a finite number")
    return value


ContainerOption = Annotated[
    str | None,
    typer.Option(
        "--container", "-c", help="Default: the inventory's", metavar="NAME", autocompletion=known("containers")
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there")]


def session(container: str | None, *, json: bool = False) -> "Session":
    """The session of a verb, from the inventory that the options name."""
    from dflash_ops.inventory.load import load_inventory
    from dflash_ops.verbs.session import open_session

    Common.json = json
    Common.session = open_session(load_inventory(Common.inventory), container)
    return Common.session


def show(model: "BaseModel", *, json: bool, render: Callable[[Any], None]) -> None:
    """Print an answer: the model as JSON, or as `render` shows it."""
    if json:
        print(model.model_dump_json(indent=2))
    else:
        render(model)


RunArgument = Annotated[
    str | None,
    typer.Argument(help="Default: the newest run of the container", metavar="RUN", autocompletion=known_runs),
]


def confirm(question: str) -> None:
    """Ask on the terminal. Raises UsageError without one, Exit when the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"there is no terminal to ask on: {question}", "add -y to mean it")
    if not typer.confirm(question, err=True):
        print("nothing was done", file=sys.stderr)
        raise typer.Exit(Exit.OK)
