"""How does a configuration become a trained drafter? Load, resume, train, save; end with the first cause.

Where torchrun starts several processes, all run this and share the run directory: they resume from the same checkpoint,
and the first one alone writes there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor

from trainer import checkpoint, config
from trainer.checkpoint import Checkpoint, CheckpointError
from trainer.config import RunConfig
from trainer.data import RowSource
from trainer.data.dataset import open_rows
from trainer.devices import require_devices
from trainer.drafter.config import DrafterConfig
from trainer.drafter.released import read_drafter
from trainer.hub import drafter_folder
from trainer.inputs import require_run
from trainer.notify import Notifier
from trainer.optim import build_optimizer
from trainer.pipeline.exchange import Processes
from trainer.pipeline.peers import PeerError, place_in_run
from trainer.pipeline.plan import total_steps
from trainer.pipeline.supervisor import Pipeline
from trainer.pipeline.types import Hooks, PipelineError, StepReport, TrainState
from trainer.signals import Interrupted, Signals
from trainer.target import load_model_config, load_tokenizer
from trainer.telemetry import Telemetry, checkpoint_metrics, pool, status_line
from trainer.wording import count

logger = logging.getLogger(__name__)

# Loading, compiling and the last save are silences in which no step can prove progress.
SILENCE_SECONDS = 1800.0
BY_LAYERS = ("layer_types", "max_window_layers")  # fields that follow a drafter's number of layers
METRICS_SECONDS = 2.0  # for the metrics of a step to be written before its checkpoint is


def run(config_path: Path, run_dir: Path, overrides: Sequence[str], resume_from: Path | None, signals: Signals) -> int:
    """Train as the YAML file at `config_path` says, with `overrides` (`key=value`); returns the exit code.

    Goes on from the newest whole checkpoint of `run_dir`, else from `resume_from`, else begins.
    """
    notifier = Notifier()
    notifier.expect_silence(SILENCE_SECONDS)
    process, processes = place_in_run()
    if processes > 1:
        notifier.status(f"process {process}: {processes} processes meet")
    try:
        with Processes.meet() as met:  # first of all: who fails from now on, be it at reading, is heard by all
            return _run(config_path, run_dir, overrides, resume_from, signals, notifier, met)
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
    met: Processes,
) -> int:
    settings = config.load(config_path, overrides)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    require_run(settings)
    require_devices("pipeline.targets", settings.pipeline.targets)
    require_devices("pipeline.drafters", settings.pipeline.drafters)
    start = find_start(run_dir, resume_from)

    first = met.process == 0
    say = logger.info if first else logger.debug  # what all of them would say alike, the first one says
    if not first:
        logging.getLogger("trainer.data").setLevel(logging.ERROR)
    rows = sum(met.peers.share(len(settings.pipeline.drafters))) * settings.optimizer.accumulate  # of a step
    notifier.status("reading data")
    source = open_rows(settings.data, settings.target)
    met.peers.check()
    target_config, tokenizer = load_model_config(settings.target), load_tokenizer(settings.target)
    drafter_config = DrafterConfig.from_section(settings.drafter, target_config, tokenizer)
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
    try:
        outcome = Pipeline(settings, drafter_config, source, watch.hooks(), state, met).run()
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


class Watch:
    """The caller's side of `Hooks`: telemetry, checkpoints, sd_notify, and the answers to signals.

    Without `telemetry` nothing is written: so it is in all processes but the first.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: RunConfig,
        source: RowSource,
        rows: int,
        drafter_config: DrafterConfig,
        telemetry: Telemetry | None,
        notifier: Notifier,
        signals: Signals,
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._source = source
        self._rows = rows  # of a step
        self._drafter_config = drafter_config
        self._telemetry = telemetry
        self._notifier = notifier
        self._signals = signals
        self._trained = False
        self._reported = 0  # the newest step whose metrics are written
        self._progress = threading.Condition()

    def hooks(self) -> Hooks:
        """What the pipeline calls."""
        return Hooks(
            on_status=self._on_status,
            on_compiled=self._on_compiled,
            on_step=self._on_step,
            on_failure=self._expect_the_end,
            should_stop=self._should_stop,
            should_checkpoint=self._signals.take_checkpoint_request,
            save=self._save,
        )

    def close(self) -> None:
        """Write what is pending."""
        if self._telemetry is not None:
            self._telemetry.close()

    def _on_status(self, text: str) -> None:
        if self._telemetry is not None:
            logger.info("%s", text)
        self._notifier.status(text)

    def _on_compiled(self, reports: list[dict[str, Any]]) -> None:
        if self._telemetry is None:
            return
        path = self._run_dir / "compile.json"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(reports, indent=2, default=str) + "\n")
        unfinished.replace(path)

    def _on_step(self, report: StepReport) -> None:
        if not self._trained:
            self._trained = True
            self._notifier.expect_progress()
            self._notifier.ready()
        self._notifier.ping()
        self._notifier.status(status_line(pool([report])))
        if self._telemetry is not None and (record := self._telemetry.step(report)) is not None:
            logger.info("%s", status_line(record))
        with self._progress:
            self._reported = report.step
            self._progress.notify_all()

    def _should_stop(self) -> bool:
        self._signals.training = True  # whoever asks will end the run in order
        if not self._signals.stop:
            return False
        self._expect_the_end()
        return True

    def _expect_the_end(self) -> None:
        """No step proves progress from now on: the watchdog must leave the time to save."""
        self._notifier.stopping()
        self._notifier.expect_silence(SILENCE_SECONDS)

    def _save(self, state: TrainState, sums: Tensor | None) -> None:
        # A run killed between a checkpoint and its step's metrics would resume behind a line that was never written.
        # Bounded, because a failing run may have no one left who writes them.
        with self._progress:
            self._progress.wait_for(lambda: self._reported >= state.step, timeout=METRICS_SECONDS)
        path = checkpoint.save(
            self._run_dir / "checkpoints",
            state.step,
            model=state.drafter,
            optimizer=state.optimizer,
            drafter_config=self._drafter_config.to_json("float32"),
            run={
                "config": self._settings.model_dump(mode="json"),
                "next_row": state.step * self._rows,
                "rows_per_step": self._rows,
                "content_hash": self._source.content_hash,
            },
            metrics=checkpoint_metrics(sums) if sums is not None else {},
            keep=self._settings.checkpoint,
        )
        logger.info("checkpoint of step %d: %s", state.step, path)


def find_start(run_dir: Path, resume_from: Path | None) -> Checkpoint | None:
    """The checkpoint to go on from: the run's own newest whole one, else `resume_from`'s, else none."""
    own = checkpoint.newest_valid(run_dir / "checkpoints")
    if own is not None or resume_from is None:
        return own
    return checkpoint.resolve(resume_from)


def refuse_another_drafter(start: Checkpoint, settings: RunConfig, drafter_config: DrafterConfig) -> None:
    """Raise CheckpointError unless weights and optimizer state of the checkpoint fit what is to be trained."""
    old, new = start.drafter_config(), json.loads(json.dumps(drafter_config.to_json("float32")))
    there, here = dict(_leaves(old)), dict(_leaves(new))
    changed = [
        f"drafter {name} is {there.get(name)} there, {value} here"
        for name, value in here.items()
        if there.get(name) != value
        and not (name in BY_LAYERS and there["num_hidden_layers"] != here["num_hidden_layers"])
    ]
    name = start.run()["config"]["optimizer"]["name"]
    if name != settings.optimizer.name:
        changed.append(f"optimizer.name is {name} there, {settings.optimizer.name} here")
    if changed:
        raise CheckpointError(
            f"checkpoint {start.path} is of another drafter or optimizer ({'; '.join(changed)}): "
            "keep what it was trained with, or start a new run in another run directory"
        )


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a drafter's configuration and of the sections in it, which repeat some of them for some engines."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield name, value


def released_start(settings: RunConfig) -> TrainState | None:
    """Step 0 with the weights of `drafter.init_from`; None where there is no such drafter to continue from."""
    if settings.drafter.init_from is None:
        return None
    drafter = read_drafter(drafter_folder(settings.drafter.init_from))
    moments = build_optimizer(drafter.named_parameters(), settings.optimizer, total_steps=1).state_dict()
    return TrainState(0, drafter.state_dict(), moments)


def warn_of_changes(start: Checkpoint, settings: RunConfig, source: RowSource, rows: int) -> None:
    """Say what keeps a resumed run from repeating an undisturbed one: it goes on, but not with the same losses."""
    before = start.run()
    if before["content_hash"] != source.content_hash:
        logger.warning("the data, its packing or its seed changed since the checkpoint: rows differ from here on")
    if before["rows_per_step"] != rows:
        logger.warning(
            "a step now takes %d rows instead of %d: the data goes on at row %d instead of %d",
            rows,
            before["rows_per_step"],
            start.step * rows,
            before["next_row"],
        )
    for section in ("objective", "optimizer"):
        old, new = before["config"][section], settings.model_dump(mode="json")[section]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                logger.warning("%s.%s was %s in the checkpoint, is %s", section, name, old.get(name), new.get(name))


def describe_length(settings: RunConfig, source: RowSource, rows: int, total: int) -> str:
    """How many steps of so many rows the run has, and why."""
    limit = settings.optimizer.max_steps
    all_steps = source.total_rows // rows
    epochs = f"{count(settings.data.epochs, 'epoch')} of {count(source.rows_per_epoch, 'row')}"
    if rows > 1:
        epochs += f", {count(rows, 'row')} a step"
    if limit is None:
        return f"{count(total, 'step')}: {epochs}"
    if limit > all_steps:
        return f"{count(total, 'step')}: {epochs} (optimizer.max_steps {limit} is not reached)"
    return f"{count(total, 'step')}, by optimizer.max_steps, of {all_steps}: {epochs}"


def warn_of_length(source: RowSource, target_config: Any) -> None:
    """Say when documents go on where the target was never meant to be. Rows may: positions restart in each document."""
    positions = getattr(target_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and source.shape.longest > positions:
        logger.warning(
            "the longest document has %d tokens, the target is made for %d positions (max_position_embeddings): set "
            "data.max_document_length to %d",
            source.shape.longest,
            positions,
            positions,
        )


def report_failure(error: PipelineError) -> None:
    """End the log with the first cause. All failures were logged as they happened, with tracebacks."""
    if error.stuck:
        logger.error("did not end in time: %s; their stacks:", ", ".join(error.stuck))
        faulthandler.dump_traceback()
    logger.error("run failed: %s", error)
