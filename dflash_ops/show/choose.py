"""Asks on the terminal which containers and interpreters `dflash init` shall write down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.transport.known_hosts import UnknownKey
    from dflash_ops.verbs.candidates import Candidate, PythonFound


def say(text: str) -> None:
    """On stderr: stdout is for the answer."""
    print(text, file=sys.stderr, flush=True)


class ByPerson:
    """Asks, with the best guess as the default."""

    def __init__(self, key: Callable[[UnknownKey], bool]) -> None:
        self._key = key

    def key(self, key: UnknownKey) -> bool:
        """See Ask."""
        return self._key(key)

    def containers(self, host: str, found: list[Candidate]) -> list[Candidate]:
        """Any that are listed, the stopped ones too."""
        if not found:
            raise UsageError(f"there is no container on {host}", "make one first, with systemd and python3 in it")
        for each in found:
            say(f"{each.vmid:>6}  {each.name}: {each.about()}")
            for python in each.inside.pythons if each.inside is not None else ():
                say(f"        {python.path}: {python.about()}")
        known = {str(each.vmid): each for each in found}
        usable = [each for each in found if each.inside is not None]
        best = next((each for each in usable if each.fitting()), usable[0] if usable else found[0])
        while True:
            given = typer.prompt("Which containers (numbers, with commas)?", default=str(best.vmid), err=True)
            words = str(given).replace(",", " ").split()
            if words and all(word in known for word in words):
                return [known[word] for word in dict.fromkeys(words)]
            say(f"choose from {', '.join(known)}")

    def python(self, chosen: Candidate) -> PythonFound | None:
        """One that is listed, or none."""
        pythons = chosen.inside.pythons if chosen.inside is not None else []
        if not pythons:
            return None
        say(f"pythons of {chosen.vmid} {chosen.name}")
        say("     0  none of them: `dflash env build` makes one from a lock file")
        for number, each in enumerate(pythons, 1):
            say(f"{number:>6}  {each.path}: {each.about()}")
        best = next((number for number, each in enumerate(pythons, 1) if each.fits), 0)
        while True:
            given = str(typer.prompt("Which one runs the trainer?", default=str(best), err=True)).strip()
            if given.isdigit() and int(given) <= len(pythons):
                return pythons[int(given) - 1] if int(given) else None
            say(f"choose from 0 to {len(pythons)}")
