"""Fetches data sets and released drafters from the model hub, into the cache that transformers uses too."""

from __future__ import annotations

from collections.abc import Sequence
from os import environ
from pathlib import Path
from typing import Literal

from trainer.inputs import InputError, hub_answers, is_hub_name

_KINDS = {"dataset": "data set", "model": "drafter"}


def fetch(field: str, written: Path, name: str, kind: Literal["dataset", "model"], patterns: Sequence[str]) -> Path:
    """The folder with those files of a repository that match one of the patterns; fetches what is not there yet.

    Without a hub, what was fetched before serves. Raises InputError, which names the configuration's `field` and what
    is `written` there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    answers = hub_answers()
    try:
        return Path(
            snapshot_download(
                name,
                repo_type=kind,
                allow_patterns=list(patterns),
                local_files_only=not answers,
                endpoint=environ.get("HF_ENDPOINT"),
            )
        )
    except HFValidationError:
        raise InputError(f"{field}: there is no {written} in {Path.cwd()}, nor can the hub have such a name") from None
    except LocalEntryNotFoundError as error:
        if answers:
            raise InputError(f"{field}: {name} cannot be fetched from the model hub: {_first_line(error)}") from error
        raise InputError(
            f"{field}: there is no {written} in {Path.cwd()}, and the model hub does not answer"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise InputError(
            f"{field}: the {_KINDS[kind]} {name} cannot be fetched from the model hub: {_first_line(error)}"
        ) from error


def drafter_folder(init_from: Path) -> Path:
    """The folder of the drafter that `drafter.init_from` names, fetched where that is a hub's name.

    Raises InputError where it cannot be had.
    """
    if init_from.is_dir() or not is_hub_name(str(init_from)):
        return init_from
    return fetch("drafter.init_from", init_from, str(init_from), "model", ["*.json", "*.safetensors"])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
