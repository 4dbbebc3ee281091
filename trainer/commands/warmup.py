"""Fills the compile cache before a run needs it, by compiling on each device what a run compiles there.

`python -m trainer warmup CONFIG [--devices cuda:0 ...]` reads what the run will read: the target, and the data, whose
longest document decides how the target's attention is launched. A run of the same configuration then starts with cache
hits alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.compilation.cache import CompileCache
from trainer.compilation.errors import CompilationError
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import CompileReport
from trainer.config.load import load
from trainer.config.sections import RunConfig
from trainer.data.rows import RowShape
from trainer.devices import find_device, require_devices
from trainer.drafter.config import DrafterConfig
from trainer.drafter.for_target import config_for_target
from trainer.inputs import require_run
from trainer.pipeline.threads import in_worker_thread
from trainer.step.step import DrafterStep
from trainer.target.features import FeatureMaker
from trainer.target.model import Target

logger = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> int:
    """Run `python -m trainer warmup`; returns the exit code."""
    from trainer.data.dataset import open_rows
    from trainer.pretrained import load_model_config, load_tokenizer

    config = load(options.config, options.set)
    require_run(config)
    if config.pipeline.mode == "eager":
        raise CompilationError("pipeline.mode eager compiles nothing that could be kept: set it to graph or compiled")
    devices = options.devices or config.pipeline.drafters
    require_devices("--devices" if options.devices else "pipeline.drafters", devices)
    require_devices("pipeline.targets", config.pipeline.targets)
    tokenizer = load_tokenizer(config.target)
    drafter = config_for_target(config.drafter, load_model_config(config.target), tokenizer)
    shape = open_rows(config.data, config.target).shape
    warm_up(config, drafter, shape, devices)
    return 0


def warm_up(
    config: RunConfig,
    drafter_config: DrafterConfig,
    shape: RowShape,
    devices: Sequence[str],
    load_target: Callable[[torch.device], Target] | None = None,
) -> list[CompileReport]:
    """Compile on each device once, into the cache that a run of `config` over rows of `shape` will use.

    Args:
        devices: where drafters will run; targets are compiled where `config` has them.
        load_target: for another target than that of `config`, as in `Pipeline`.

    Raises:
        CompilationError: no cache folder is set, or the step does not compile.
    """
    places = list(dict.fromkeys(map(find_device, devices)))
    cache = CompileCache.of_run(config, drafter_config, places[0])
    if cache is None:
        raise CompilationError("no compile cache to fill: set pipeline.compile_cache or $DFLASH_COMPILE_CACHE")
    cache.activate()
    load = load_target or partial(Target.of_run, config, drafter_config.target_layer_ids)
    with CompilePhase(config.pipeline.mode) as phase:
        for number, device in enumerate(dict.fromkeys(map(find_device, config.pipeline.targets))):
            if device.type == "cuda" and config.pipeline.mode == "graph":
                maker = FeatureMaker.of_run(config, load(device), shape)
                in_worker_thread(device, partial(_compile_target, phase, f"target {number}", device, maker))
                logger.info("%s", phase.reports[-1].describe())
        for number, device in enumerate(places):
            in_worker_thread(device, partial(_compile, phase, f"drafter {number}", device, config, drafter_config))
            logger.info("%s", phase.reports[-1].describe())
        phase.require_compiled()
    logger.info("compile cache %s: %.1f MB", cache.directory, cache.size() / 1e6)
    return phase.reports


def _compile_target(
    phase: CompilePhase, worker: str, device: torch.device, maker: FeatureMaker, stream: torch.cuda.Stream | None
) -> None:
    with phase.turn(worker, device, stream) as turn:
        maker.prepare(turn)


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
