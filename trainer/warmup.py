"""How is the compile cache filled before a run needs it? By compiling a run's step on each of its devices.

`python -m trainer warmup CONFIG [--devices cuda:0 ...]` needs the target's configuration and tokenizer, but not its
weights, which compiled code does not depend on. A run of the same configuration then starts with cache hits alone.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from trainer.compilation import CompilationError, CompileCache, CompilePhase, CompileReport
from trainer.config import RunConfig, load
from trainer.drafter.config import DrafterConfig
from trainer.pipeline.threads import in_worker_thread
from trainer.step import DrafterStep

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Fill the cache of a configuration."""
    from trainer.run import load_target_config
    from trainer.target import load_tokenizer

    parser = argparse.ArgumentParser(prog="python -m trainer warmup", description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path, help="the run's YAML file")
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help="default: pipeline.drafters of the file")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change fields")
    options = parser.parse_args(arguments)
    config = load(options.config, options.set)
    tokenizer = load_tokenizer(config.target)
    drafter = DrafterConfig.from_section(config.drafter, load_target_config(config.target), tokenizer)
    warm_up(config, drafter, options.devices or config.pipeline.drafters)
    return 0


def warm_up(config: RunConfig, drafter_config: DrafterConfig, devices: Sequence[str]) -> list[CompileReport]:
    """Compile on each device once, into the cache that a run of `config` will use.

    Raises:
        CompilationError: no cache folder is set, or the step does not compile.
    """
    places = [torch.device(name) for name in dict.fromkeys(devices)]
    cache = CompileCache.of_run(config, drafter_config, places[0])
    if cache is None:
        raise CompilationError("no compile cache to fill: set pipeline.compile_cache or $DFLASH_COMPILE_CACHE")
    cache.activate()
    with CompilePhase(config.pipeline.mode) as phase:
        for number, device in enumerate(places):
            start = time.monotonic()
            in_worker_thread(device, partial(_compile, phase, f"drafter {number}", device, config, drafter_config))
            report = phase.reports[-1]
            logger.info(
                "%s: %d kernels, %d cache hits, %d misses, %.1f s",
                device,
                report.kernels,
                report.cache_hits,
                report.cache_misses,
                time.monotonic() - start,
            )
        phase.require_compiled()
    logger.info("compile cache %s: %.1f MB", cache.directory, cache.size() / 1e6)
    return phase.reports


def _compile(
    phase: CompilePhase,
    worker: str,
    device: torch.device,
    config: RunConfig,
    drafter_config: DrafterConfig,
    stream: torch.cuda.Stream | None,
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = torch.zeros(drafter_config.vocab_size, drafter_config.hidden_size, dtype=dtype, device=device)
    with phase.turn(worker, device, stream) as turn:
        DrafterStep.build(config, drafter_config, embedding=table, head=table, total_steps=1).prepare(turn)
