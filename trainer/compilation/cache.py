"""Keeps compiled kernels in a folder per software, GPU type and shapes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from trainer.compilation.errors import CompilationError
from trainer.config.sections import RunConfig
from trainer.drafter.config import DrafterConfig

CACHE_VARIABLE = "DFLASH_COMPILE_CACHE"
# What the compiled code is made of; a release that changes other files keeps its cache.
COMPILED_SOURCES = (
    "compilation/phase.py",
    "compilation/tracing.py",
    "compilation/turn.py",
    "drafter/attention.py",
    "drafter/blocks.py",
    "drafter/config.py",
    "drafter/model.py",
    "step/objective.py",
    "step/optim.py",
    "step/step.py",
    "target/attention.py",
    "target/features.py",
    "target/inputs.py",
    "target/model.py",
)


@dataclass(frozen=True)
class CompileCache:
    """A folder of compiled kernels that belongs to one key.

    Inductor's and Triton's own keys keep it correct; ours keeps apart what can never be shared, so that an old driver's
    or an old trainer's kernels can be told from those in use and removed.
    """

    directory: Path
    key: Mapping[str, Any]

    @classmethod
    def open(cls, root: Path, device: torch.device, shapes: Mapping[str, Any]) -> CompileCache:
        """The cache under `root` for this software, this GPU type and these shapes; made when missing.

        Raises:
            CompilationError: the folder can't be written.
        """
        key = {**software_key(device), "shapes": dict(shapes)}
        text = json.dumps(key, indent=2, sort_keys=True, default=str) + "\n"
        cache = cls(root / hashlib.sha256(text.encode()).hexdigest()[:20], key)
        try:
            cache.directory.mkdir(parents=True, exist_ok=True)
            (cache.directory / "key.json").write_text(text)
        except OSError as error:
            raise CompilationError(
                f"compile cache {root} can't be written: {error.strerror}; set pipeline.compile_cache or "
                f"${CACHE_VARIABLE} to a writable folder"
            ) from error
        return cache

    @classmethod
    def of_run(cls, config: RunConfig, drafter: DrafterConfig, device: torch.device) -> CompileCache | None:
        """The cache of a run's drafters: below the configured folder, else $DFLASH_COMPILE_CACHE.

        None where neither is set: torch then uses its own default folder.
        """
        root = config.pipeline.compile_cache or os.environ.get(CACHE_VARIABLE)
        if not root:
            return None
        shapes = {
            "sequence_length": config.data.sequence_length,
            "anchors": config.data.anchors_per_row,
            "drafter": asdict(drafter),
            "objective": config.objective.model_dump(),
            "mode": config.pipeline.mode,
        }
        return cls.open(Path(root), device, shapes)

    def activate(self) -> None:
        """Make Inductor and Triton of this process use the folder; before the first compilation."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.directory / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(self.directory / "triton")

    def size(self) -> int:
        """Bytes in the folder."""
        return sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())


def software_key(device: torch.device) -> dict[str, str]:
    """What compiled code depends on beside its shapes."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    driver = Path("/proc/driver/nvidia/version")
    on_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "triton": triton,
        "driver": driver.read_text().splitlines()[0] if on_gpu and driver.exists() else "none",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "trainer": compiled_source_hash(),
    }


def compiled_source_hash() -> str:
    """A hash over the trainer's files that compiled code is made from."""
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for name in COMPILED_SOURCES:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def start_compiler_processes() -> None:
    """Let Inductor start the processes in which it compiles kernels, unless its cache holds some already.

    It would start them with the first kernel, and compile in the calling thread, one kernel after the other, for the
    seconds that they take to come up. Returns at once: they come up while the target is loaded.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not any(Path(cache_dir()).glob("fxgraph/*")):
        AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]
