"""Reads the job's variables, with their `env:` and `file:` references."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.models import JobEntry, home_expanded


def resolve_variables(name: str, job: JobEntry) -> dict[str, str]:
    """The job's variables with `env:` and `file:` references read. Values may be secrets. Raises ConfigurationError."""
    found = {}
    for key, value in job.env.items():
        if value.startswith("env:"):
            source = value.removeprefix("env:")
            if source not in os.environ:
                near = difflib.get_close_matches(source, os.environ, 1)
                hint = f"did you mean {near[0]}?" if near else f"`export {source}=…` first"
                raise ConfigurationError(f"job {name} needs the variable {source}, which is not set here", hint)
            found[key] = os.environ[source]
        elif value.startswith("file:"):
            path = home_expanded(Path(value.removeprefix("file:")))
            try:
                found[key] = path.read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ConfigurationError(f"job {name} needs the file {path}: {why}", f"correct `env.{key}`") from error
        else:
            found[key] = value
        if any("\ud800" <= letter <= "\udfff" for letter in found[key]):  # how Python holds bytes that are no UTF-8
            raise ConfigurationError(f"the variable {key} of job {name} is not UTF-8 text", "encode it, e.g. in base64")
        if "\0" in found[key]:
            raise ConfigurationError(f"the variable {key} of job {name} holds a NUL byte", "variables cannot")
    return found
