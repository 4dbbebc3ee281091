"""Turns a configuration into a trained drafter: loads, resumes, trains, saves, and ends with the first cause.

Where torchrun starts several processes, all run this and share the run directory: they resume from the same checkpoint,
and the first one alone writes there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
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
from trainer.pipeline.types import PipelineError, StopOverdueError, TrainState
from trainer.pretrained import load_model_config, load_tokenizer
from trainer.run import checkpoint
from trainer.run.checkpoint import WholeCheckpoint
from trainer.run.checks import describe_drafter, describe_length, refuse_another_drafter, warn_of_length
from trainer.run.directory import RunDirectory
from trainer.run.notify import Notifier
from trainer.run.resume import facts, held_out_name, refuse_later, resumed_schedule, warn_of_differences
from trainer.run.signals import Interrupted, Signals
from trainer.run.telemetry import Telemetry
from trainer.run.watch import START_SECONDS, Watch
from trainer.step.optim import Schedule, build_optimizer

logger = logging.getLogger(__name__)


def run(config_path: Path, run_dir: Path, overrides: Sequence[str], resume_from: Path | None, signals: Signals) -> int:
    """Train as the YAML file at `config_path` says, with `overrides` (`key=value`); returns the exit code.

    Goes on from the newest whole checkpoint of `run_dir`, else from `resume_from`, else begins.
    """
    notifier = Notifier()
    notifier.expect_silence(START_SECONDS)
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
    first = processes.rank == 0
    directory = RunDirectory(run_dir) if first and run_dir.is_dir() else None  # locked as long as this object is there
    own, start = find_start(run_dir, resume_from, directory)
    say = logger.info if first else logger.debug  # what all of them would say alike, the first one says
    if not first:
        logging.getLogger("trainer.data").setLevel(logging.ERROR)
    drafters = sum(processes.peers.share(len(settings.pipeline.drafters)))
    rows = drafters * settings.optimizer.gradient_accumulation_steps  # of a step
    notifier.status("reading data")
    source, held_out = open_rows(settings.data, settings.target)
    processes.peers.check()
    target_config, tokenizer = load_model_config(settings.target), load_tokenizer(settings.target)
    drafter_config = config_for_target(settings.drafter, target_config, tokenizer)
    step, row = (start.step, start.run()["next_row"]) if start is not None else (0, 0)
    total = total_steps(source.total_rows, rows, settings.optimizer.max_steps, step=step, row=row)
    now = facts(settings, source, target_config, processes.world_size, drafters) if first else {}
    schedule = None
    if start is not None:
        refuse_another_drafter(start, settings, drafter_config)
        refuse_later(start, source.total_rows, total)
        if step == total:
            field = "optimizer.max_steps" if settings.optimizer.max_steps == total else "data.epochs"
            say("finished before, at step %d of %d: a greater %s continues it", total, total, field)
            return 0
        if first:
            warn_of_differences(start, settings, now)
        schedule = resumed_schedule(start, settings, rows_per_step=rows, last_step=total)
    say("%s; rows %s", describe_drafter(drafter_config, settings), source.content_hash)
    say("%s", describe_length(settings, source, rows, total))
    if first:
        for rows_read in filter(None, (source, held_out)):
            warn_of_length(rows_read, target_config)

    telemetry, run_id = None, None
    if first:  # of several processes, it alone writes
        run_dir.mkdir(parents=True, exist_ok=True)  # not before, so that a start that fails leaves nothing behind
        directory = directory or RunDirectory(run_dir)
        run_id = directory.identify(own)
        telemetry = Telemetry(run_dir, settings.telemetry, settings.model_dump(mode="json"), step)
    if start is not None:
        say("resuming from step %d, row %d: %s", step, row, start.path)
        if telemetry is not None:
            telemetry.event("resume", step=step, row=row, checkpoint=str(start.path))
    noted = {"rows_per_step": rows, "content_hash": source.content_hash, "run_id": run_id, "facts": now}
    measured = 0  # rows of a drafter
    if held_out is not None:
        noted["held_out"] = held_out_name(held_out, settings)
        measured = math.ceil(min(held_out.total_rows, settings.data.held_out_rows) / drafters)
    watch = Watch(run_dir, settings, noted, drafter_config, telemetry, notifier, signals, measured)
    state = resumed_start(start, schedule) if start is not None else released_start(settings)
    pipeline = Pipeline(settings, drafter_config, source, watch.hooks(), state, processes, held_out=held_out)
    return _train(pipeline, watch, signals, say)


def _train(pipeline: Pipeline, watch: Watch, signals: Signals, say: Callable[..., None]) -> int:
    """Run the pipeline to its end, say how it ended, and return the exit code."""
    try:
        outcome = pipeline.run()
    except PipelineError as error:
        interrupted = isinstance(error.__cause__, Interrupted)
        overdue = isinstance(error.__cause__, StopOverdueError)
        if not interrupted:
            report_failure(error)
        with contextlib.suppress(Exception):  # a full disk may be the very cause, and sinks raise what they like
            watch.close()
        if interrupted:
            logger.warning("second Ctrl-C: left without finishing the step")
        code = signals.exit_code if interrupted or overdue else 1
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


def find_start(
    run_dir: Path, resume_from: Path | None, directory: RunDirectory | None
) -> tuple[WholeCheckpoint | None, WholeCheckpoint | None]:
    """The run's own newest whole checkpoint, and the one to go on from: that, else `resume_from`'s, else none."""
    own = checkpoint.newest_valid(run_dir / "checkpoints")
    if directory is not None and own is not None:
        directory.require_own(own)
    if own is not None or resume_from is None:
        return own, own
    return None, checkpoint.resolve(resume_from)


def resumed_start(start: WholeCheckpoint, schedule: Schedule | None) -> TrainState:
    """The state that a checkpoint holds; a checkpoint of an earlier version counts no tokens."""
    run = start.run()
    return TrainState(start.step, start.model(), start.optimizer(), run["next_row"], run.get("tokens", 0), schedule)


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
