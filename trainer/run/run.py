"""Turns a configuration into a trained drafter: loads, resumes, trains, saves, and ends with the first cause.

Where torchrun starts several processes, all run this and share the run directory: they resume from the same checkpoint,
and the first one alone writes there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import transformers

from trainer.config.load import load
from trainer.config.sections import RunConfig
from trainer.data.dataset import open_rows
from trainer.devices import require_devices
from trainer.drafter.for_target import config_for_target
from trainer.drafter.released import read_drafter
from trainer.exchange.peers import PeerError, rank_and_world_size
from trainer.exchange.rendezvous import Processes
from trainer.hub import drafter_folder
from trainer.inputs import require_run
from trainer.pipeline.plan import total_steps
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.types import PipelineError, TrainState
from trainer.pretrained import load_model_config, load_tokenizer
from trainer.run import checkpoint
from trainer.run.checkpoint import WholeCheckpoint
from trainer.run.checks import describe_length, refuse_another_drafter, warn_of_changes, warn_of_length
from trainer.run.notify import Notifier
from trainer.run.signals import Interrupted, Signals
from trainer.run.telemetry import Telemetry
from trainer.run.watch import SILENCE_SECONDS, Watch
from trainer.step.optim import build_optimizer
from trainer.wording import count

logger = logging.getLogger(__name__)


def run(config_path: Path, run_dir: Path, overrides: Sequence[str], resume_from: Path | None, signals: Signals) -> int:
    """Train as the YAML file at `config_path` says, with `overrides` (`key=value`); returns the exit code.

    Goes on from the newest whole checkpoint of `run_dir`, else from `resume_from`, else begins.
    """
    notifier = Notifier()
    notifier.expect_silence(SILENCE_SECONDS)
    rank, world_size = rank_and_world_size()
    if world_size > 1:
        notifier.status(f"process {rank}: {world_size} processes meet")
    try:
        # Before anything is read: from here on each process hears of the others' failures.
        with Processes.rendezvous() as processes:
            return _run(config_path, run_dir, overrides, resume_from, signals, notifier, processes)
    except PeerError as error:
        logger.error("run failed: another process failed: PeerError: %s", error)
        return 1


def _run(
    config_path: Path,
    run_dir: Path,
    overrides: Sequence[str],
    resume_from: Path | None,
    signals: Signals,
    notifier: Notifier,
    processes: Processes,
) -> int:
    settings = load(config_path, overrides)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    require_run(settings)
    require_devices("pipeline.targets", settings.pipeline.targets)
    require_devices("pipeline.drafters", settings.pipeline.drafters)
    start = find_start(run_dir, resume_from)

    first = processes.rank == 0
    say = logger.info if first else logger.debug  # what all of them would say alike, the first one says
    if not first:
        logging.getLogger("trainer.data").setLevel(logging.ERROR)
    drafters = sum(processes.peers.share(len(settings.pipeline.drafters)))
    rows = drafters * settings.optimizer.gradient_accumulation_steps  # of a step
    notifier.status("reading data")
    source = open_rows(settings.data, settings.target)
    processes.peers.check()
    target_config, tokenizer = load_model_config(settings.target), load_tokenizer(settings.target)
    drafter_config = config_for_target(settings.drafter, target_config, tokenizer)
    total = total_steps(source.total_rows, rows, settings.optimizer.max_steps)
    if start is not None:
        refuse_another_drafter(start, settings, drafter_config)
        if start.step == total:
            field = "optimizer.max_steps" if settings.optimizer.max_steps == total else "data.epochs"
            say("finished before, at step %d of %d: a greater %s continues it", total, total, field)
            return 0
        if first:
            warn_of_changes(start, settings, source, rows)
    say(
        "drafter of %s, blocks of %d, reading layers %s of %s; rows %s",
        count(drafter_config.num_hidden_layers, "layer"),
        drafter_config.block_size,
        list(drafter_config.target_layer_ids),
        settings.target.path,
        source.content_hash,
    )
    say("%s", describe_length(settings, source, rows, total))
    if first:
        warn_of_length(source, target_config)

    step = start.step if start else 0
    telemetry = None
    if first:  # of several processes, it alone writes
        run_dir.mkdir(parents=True, exist_ok=True)  # not before, so that a start that fails leaves nothing behind
        telemetry = Telemetry(run_dir, settings.telemetry, settings.model_dump(mode="json"), step)
    if start is not None:
        say("resuming from step %d: %s", step, start.path)
        if telemetry is not None:
            telemetry.event("resume", step=step, checkpoint=str(start.path))
    watch = Watch(run_dir, settings, source, rows, drafter_config, telemetry, notifier, signals)
    state = TrainState(step, start.model(), start.optimizer()) if start else released_start(settings)
    pipeline = Pipeline(settings, drafter_config, source, watch.hooks(), state, processes)
    return _train(pipeline, watch, signals, say)


def _train(pipeline: Pipeline, watch: Watch, signals: Signals, say: Callable[..., None]) -> int:
    """Run the pipeline to its end, say how it ended, and return the exit code."""
    try:
        outcome = pipeline.run()
    except PipelineError as error:
        interrupted = isinstance(error.__cause__, Interrupted)
        if not interrupted:
            report_failure(error)
        with contextlib.suppress(Exception):  # a full disk may be the very cause, and sinks raise what they like
            watch.close()
        if interrupted:
            logger.warning("second Ctrl-C: left without finishing the step")
        code = signals.exit_code if interrupted else 1
        if error.stuck:  # threads that hang in a driver can't be joined, and would keep the process from ending
            logging.shutdown()
            os._exit(code)
        return code
    watch.close()
    say("%s at step %d of %d", "stopped" if outcome.stopped else "finished", outcome.step, outcome.total_steps)
    code = signals.exit_code if outcome.stopped else 0
    if outcome.stuck:
        logging.shutdown()
        os._exit(code)
    return code


def find_start(run_dir: Path, resume_from: Path | None) -> WholeCheckpoint | None:
    """The checkpoint to go on from: the run's own newest whole one, else `resume_from`'s, else none."""
    own = checkpoint.newest_valid(run_dir / "checkpoints")
    if own is not None or resume_from is None:
        return own
    return checkpoint.resolve(resume_from)


def released_start(settings: RunConfig) -> TrainState | None:
    """Step 0 with the weights of `drafter.init_from`; None where there is no such drafter to continue from."""
    if settings.drafter.init_from is None:
        return None
    drafter = read_drafter(drafter_folder(settings.drafter.init_from))
    moments = build_optimizer(drafter.named_parameters(), settings.optimizer, total_steps=1).state_dict()
    return TrainState(0, drafter.state_dict(), moments)


def report_failure(error: PipelineError) -> None:
    """End the log with the first cause. All failures were logged as they happened, with tracebacks."""
    if error.stuck:
        logger.error("did not end in time: %s; their stacks:", ", ".join(error.stuck))
        faulthandler.dump_traceback()
    logger.error("run failed: %s", error)
