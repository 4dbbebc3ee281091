"""Starts, watches and ends the threads of a run.

`Pipeline.run` builds everything, lets the workers compile one after the other, opens the start, and then only listens:
to reports, to the caller's wishes, and to the first failure. It returns when all is done and raises `PipelineError`
with the first cause otherwise; both within bounded time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.compilation.cache import CompileCache
from trainer.compilation.phase import CompilePhase
from trainer.config.sections import RunConfig
from trainer.data.rows import RowSource
from trainer.devices import find_device
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import fresh_weights
from trainer.exchange.peers import PeerError
from trainer.exchange.reduce import ExchangeError, Group
from trainer.exchange.rendezvous import Processes
from trainer.pipeline.checkpoint_worker import CheckpointWorker
from trainer.pipeline.drafter_worker import DrafterWorker
from trainer.pipeline.loading import Tables, describe_loaded, finish_loading
from trainer.pipeline.plan import RowPlan, total_steps
from trainer.pipeline.queues import Ring
from trainer.pipeline.row_worker import RowWorker
from trainer.pipeline.shared import Shared
from trainer.pipeline.skipped import SkippedRows
from trainer.pipeline.statistics import WorkerStatistics, describe
from trainer.pipeline.target_worker import TargetWorker
from trainer.pipeline.types import (
    HeldOutReport,
    Hooks,
    Outcome,
    PipelineConfigError,
    PipelineError,
    StepReport,
    StopOverdueError,
    TrainState,
)
from trainer.pipeline.worker import Worker
from trainer.step.optim import Schedule
from trainer.target.model import Target

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # how fast a wish of the caller is seen
WORD_SECONDS = 2.0  # for the word that explains why drafters of other processes can't be reached
END_SECONDS = 5.0  # for workers to end after a failure; a thread that hangs in a driver is left behind
SAVE_SECONDS = 60.0  # for writing a failed run's last checkpoint, and for one that is being written


class Pipeline:
    """One training run in this process."""

    def __init__(
        self,
        config: RunConfig,
        drafter_config: DrafterConfig,
        source: RowSource,
        hooks: Hooks,
        start: TrainState | None = None,
        processes: Processes | None = None,
        *,
        load_target: Callable[[torch.device], Target] | None = None,
        held_out: RowSource | None = None,
    ) -> None:
        """Nothing runs before `run`.

        Args:
            start: the state to go on from; None: the drafter that `config.seed` draws, and a fresh optimizer.
            processes: the run's processes, if they have met already; the caller tells them of what happens before
                `run`.
            load_target: loads a target onto a device; called once per target worker in the thread that calls `run`,
                since loading changes torch's default type for a moment. Default: the one that `config.target` names.
            held_out: rows to measure on and not to train on; of the same lengths as those of `source`.
        """
        self._config, self._drafter_config, self._source = config, drafter_config, source
        self._hooks, self._start, self._processes = hooks, start, processes
        self._held_out = held_out
        self._load_target = load_target or partial(Target.of_run, config, drafter_config.target_layer_ids)

    def run(self) -> Outcome:
        """Train to the end, or until `Hooks.should_stop`.

        Raises:
            PipelineError: a worker or another process failed; its first cause is `__cause__`.
            SetupError: the run's other processes can't be met, or begin otherwise.
            PipelineConfigError, DeviceError: the configuration cannot be run; before anything started.
        """
        config = self._config
        target_devices = [find_device(name) for name in config.pipeline.targets]
        drafter_devices = [find_device(name) for name in config.pipeline.drafters]
        if len({device.type for device in (*target_devices, *drafter_devices)}) > 1:
            raise PipelineConfigError("pipeline.targets and pipeline.drafters mix CPUs and CUDA GPUs: use one kind")
        try:
            with self._processes or Processes.rendezvous() as processes:
                processes.agree(self._agreed())
                return self._run(Group.of(processes, drafter_devices), target_devices, drafter_devices)
        except PeerError as error:  # before the workers began
            raise PipelineError("another process", error, later=[], stuck=[]) from error

    def _run(self, group: Group, target_devices: list[torch.device], drafter_devices: list[torch.device]) -> Outcome:
        config = self._config
        plan = self._plan(group, len(drafter_devices))
        cache = CompileCache.of_run(config, self._drafter_config, drafter_devices[0])
        if cache is not None:
            cache.activate()
        with CompilePhase(config.pipeline.mode) as phase:
            shared = Shared(
                config,
                plan,
                phase,
                rows=Ring(config.pipeline.queue_depth * len(target_devices)),
                deliveries=[Ring(config.pipeline.queue_depth) for _ in drafter_devices],
                buffers=[[] for _ in drafter_devices],
                exchanges=group.exchanges(drafter_devices),
            )
            workers = self._workers(shared, group.processes, target_devices, drafter_devices)
            finish_loading({*target_devices, *drafter_devices})
            group.processes.begin_training()
            trains = not self._hooks.should_stop() or group.processes.world_size > 1
            try:
                for worker in workers:
                    worker.start()
                trains = trains and self._prepare(shared, workers, cache, group)
                if trains:
                    self._listen(shared, workers, group)
            except BaseException as error:  # a hook, or Ctrl-C
                shared.fail("main", error)
            if shared.failures:
                raise self._end_failed_run(shared, workers, group)
            if not trains:
                return self._leave(shared, workers)
            drafter = next(worker for worker in workers if isinstance(worker, DrafterWorker))
            total = self._statistics.total()
            log.info("%s", describe(total))
            stuck = [worker.name for worker in workers if worker.is_alive()]
            if stuck:
                log.warning("did not end in time and is left behind: %s", ", ".join(stuck))
            return Outcome(drafter.step, plan.total_steps, drafter.step < plan.total_steps, total, stuck)

    # ---------------------------------------------------------------------------------------------------------- start

    def _agreed(self) -> dict[str, Any]:
        """What all processes of the run must have alike, by the name that people know it by."""
        config = self._config
        target = config.target
        described = {"drafter": asdict(self._drafter_config), "objective": config.objective.model_dump(mode="json")}
        held_out_hash = self._held_out.content_hash if self._held_out is not None else None
        described["optimizer"] = config.optimizer.model_dump(mode="json")
        settings = {f"{section}.{name}": value for section, found in described.items() for name, value in found.items()}
        return {
            "start step": self._start.step if self._start is not None else 0,
            "start row": self._start.row if self._start is not None else 0,
            "rows": f"{self._source.total_rows} of {self._source.content_hash}",
            "held-out rows": self._held_out_rows() and f"{self._held_out_rows()} of {held_out_hash}",
            "data.held_out_every": config.data.held_out_every,
            "seed": config.seed,
            "target.path": target.path,
            "target.gguf_file": target.gguf_file,
            "target.dtype": target.dtype,
            "checkpoint.every": config.checkpoint.every,
            **json.loads(json.dumps(settings)),
        }

    def _plan(self, group: Group, drafters: int) -> RowPlan:
        optimizer = self._config.optimizer
        rows = optimizer.gradient_accumulation_steps  # of a drafter in a step
        done, row = (self._start.step, self._start.row) if self._start is not None else (0, 0)
        total_rows, per_step = self._source.total_rows, group.drafters * rows
        steps = total_steps(total_rows, per_step, optimizer.max_steps, step=done, row=row)
        if steps == 0:
            raise PipelineConfigError(
                f"{self._source.total_rows} rows do not fill one optimizer step of {group.drafters} drafters with "
                f"{rows} rows each: use more documents, more epochs or fewer drafters"
            )
        if done > steps:
            raise PipelineConfigError(f"the checkpoint is at step {done}, past this run's last step {steps}")
        every = (self._config.data.held_out_every, self._config.checkpoint.every)
        held_out = self._held_out_rows()
        return RowPlan(drafters, group.first_drafter, group.drafters, rows, done, steps, row, held_out, every)

    def _held_out_rows(self) -> int:
        return min(self._held_out.total_rows, self._config.data.held_out_rows) if self._held_out is not None else 0

    def _schedule(self, plan: RowPlan) -> Schedule:
        if self._start is not None and self._start.schedule is not None:
            return self._start.schedule
        return Schedule(plan.row_after(plan.total_steps), plan.rows_per_step)

    def _workers(
        self,
        shared: Shared,
        processes: Processes,
        target_devices: list[torch.device],
        drafter_devices: list[torch.device],
    ) -> list[Worker]:
        start = self._start
        self._hooks.on_status("loading the target")
        loaded = []
        for device in target_devices:
            processes.peers.check()
            loaded.append(self._load_target(device))
        shape = self._source.shape
        if self._held_out is not None:
            shape = shape.or_larger(self._held_out.shape)
        targets = [TargetWorker(number, shared, target, shape) for number, target in enumerate(loaded)]
        tables = Tables(loaded[0])
        weights = start.drafter if start is not None else self._fresh_weights(loaded[0])
        if processes.world_size > 1:
            processes.agree(describe_loaded(loaded[0], weights, start))
        rows = RowWorker(
            shared,
            self._source,
            self._drafter_config.block_size,
            pin=any(device.type == "cuda" for device in (*target_devices, *drafter_devices)),
            held_out=self._held_out,
        )
        skipped = SkippedRows(self._source, self._config.data.max_skipped_rows)
        drafters = []
        for number, device in enumerate(drafter_devices):
            embedding, head = tables.on(device)
            drafters.append(
                DrafterWorker(
                    number,
                    shared,
                    device,
                    drafter_config=self._drafter_config,
                    weights=weights,
                    start=start,
                    schedule=self._schedule(shared.plan),
                    embedding=embedding,
                    head=head,
                    exchange=shared.exchanges[number],
                    statistics=lambda: self._statistics.recent(),
                    skipped=skipped,
                )
            )
        self._statistics = WorkerStatistics(shared, rows, list(targets), list(drafters))
        return [rows, *targets, *drafters, CheckpointWorker(shared, self._hooks.save)]

    def _fresh_weights(self, target: Target) -> dict[str, Tensor]:
        return fresh_weights(self._drafter_config, target.head, self._config.seed)

    def _prepare(self, shared: Shared, workers: list[Worker], cache: CompileCache | None, group: Group) -> bool:
        """The compilation phase: each worker in turn, in its own thread; then the start for all.

        False when a failure or a stop came before the start. Of several processes none stops alone: after the first
        step all of them agree.
        """
        drafters = [worker for worker in workers if isinstance(worker, DrafterWorker)]
        require = self._config.pipeline.require_compiled
        if require is None:
            require = any(worker.device.type == "cuda" for worker in drafters)
        for worker in workers:
            if isinstance(worker, DrafterWorker):
                doing = "preparing" if shared.phase.mode == "eager" else "compiling"
                self._hooks.on_status(f"{doing} drafter {drafters.index(worker) + 1}/{len(drafters)}")
            worker.may_prepare.set()
            while not worker.prepared.wait(POLL_SECONDS):
                if group.processes.world_size == 1 and self._hooks.should_stop():
                    return False
                self._look_at_peers(shared, group)
                if shared.ending.is_set():
                    return False
            if shared.ending.is_set():
                return False
            if require:  # at once: the next worker may compile for a minute
                shared.phase.require_compiled()
        shared.phase.close()
        state = {"cache_directory": str(cache.directory), "cache_bytes": cache.size()} if cache is not None else {}
        self._hooks.on_compiled([{**asdict(report), **state} for report in shared.phase.reports])
        for report in shared.phase.reports:
            log.info("%s", report.describe())
        try:  # some compile for longer than a collective waits
            group.processes.peers.share(None)
        except PeerError as error:
            shared.fail("another process", error)
            return False
        self._statistics.restart()
        shared.started.set()
        return True

    # ----------------------------------------------------------------------------------------------------------- while

    def _listen(self, shared: Shared, workers: list[Worker], group: Group) -> None:
        deadline = end = math.inf  # of a stop, and of workers that nobody needs any more
        while any(worker.is_alive() for worker in workers) and not shared.ending.is_set() and time.monotonic() < end:
            if not shared.stop_requested.is_set() and self._hooks.should_stop():
                shared.stop_requested.set()
                deadline = time.monotonic() + self._config.pipeline.stop_seconds
            if time.monotonic() > deadline and _is_training(workers):
                seconds = self._config.pipeline.stop_seconds
                shared.fail("main", StopOverdueError(f"the step did not end within {seconds:g} s of the stop"))
                return
            if self._hooks.should_checkpoint():
                shared.checkpoint_requested.set()
            self._look_at_peers(shared, group)
            if not any(isinstance(worker, DrafterWorker) and worker.is_alive() for worker in workers):
                # After a stop there are rows and features that nobody takes any more.
                shared.close_rings()
                if end == math.inf and not any(worker.is_alive() for worker in workers if worker.name == "checkpoint"):
                    end = time.monotonic() + END_SECONDS
            with contextlib.suppress(queue.Empty):
                self._pass_on(shared.reports.get(timeout=POLL_SECONDS))
        if not shared.ending.is_set():
            self._pass_on_reports(shared)

    def _pass_on_reports(self, shared: Shared) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._pass_on(shared.reports.get_nowait())

    def _pass_on(self, report: StepReport | HeldOutReport) -> None:
        if isinstance(report, HeldOutReport):
            self._hooks.on_held_out(report)
        else:
            self._hooks.on_step(report)

    def _look_at_peers(self, shared: Shared, group: Group) -> None:
        if (failure := group.processes.peers.failure()) is not None:
            shared.fail("another process", PeerError(failure))

    # ------------------------------------------------------------------------------------------------------------- end

    def _end_failed_run(self, shared: Shared, workers: list[Worker], group: Group) -> PipelineError:
        """Bring everything down, save what can be saved, and say what happened."""
        self._await_explanation(shared, group)
        worker, cause = shared.failures[0]
        group.processes.peers.tell_failure(worker, cause)
        try:
            self._hooks.on_failure()
        except Exception as error:  # the first cause must stay the first
            log.warning("the end of the run could not be announced: %s", error)
        stuck = self._join(workers)
        self._hand_over_reports_quietly(shared)
        if not self._save_unsaved(shared, workers, stuck):
            stuck.append("checkpoint")
        return PipelineError(worker, cause, later=shared.failures[1:], stuck=stuck)

    def _await_explanation(self, shared: Shared, group: Group) -> None:
        """Put another process's end before the broken exchange that was seen first, but is its consequence."""
        deadline = time.monotonic() + WORD_SECONDS
        while _only_broken_exchanges(shared) and group.processes.world_size > 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._look_at_peers(shared, group)
        shared.failures.sort(key=lambda failure: isinstance(failure[1], ExchangeError))

    def _leave(self, shared: Shared, workers: list[Worker]) -> Outcome:
        """End a run that was stopped before its first step: there is nothing to save."""
        shared.end()
        step = shared.plan.start_step
        return Outcome(step, shared.plan.total_steps, True, {}, stuck=self._join(workers))

    def _join(self, workers: list[Worker]) -> list[str]:
        """Wait for workers that were told to end; the names of those that did not in time."""
        deadline = time.monotonic() + END_SECONDS
        for thread in workers:
            thread.may_prepare.set()
        for thread in workers:
            if thread.ident is None:  # it could not be started
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.saving.is_set():
                thread.join(SAVE_SECONDS)
        return [thread.name for thread in workers if thread.is_alive()]

    def _hand_over_reports_quietly(self, shared: Shared) -> None:
        try:
            self._pass_on_reports(shared)
        except Exception as error:
            log.warning("reports of the last steps are lost: %s", error)

    def _save_unsaved(self, shared: Shared, workers: list[Worker], stuck: list[str]) -> bool:
        """Save what is worth it; False when that did not end in time."""
        if any(name == "checkpoint" for name, _ in shared.failures):
            return True
        hanging = [worker for worker in workers if isinstance(worker, DrafterWorker) and worker.name in stuck]
        if shared.unsaved is None and not hanging:
            return True
        if "checkpoint" in stuck:  # one writer at a time
            log.warning("no last checkpoint: an earlier one is still being written")
            return True

        def save() -> None:
            try:
                unsaved = shared.unsaved
                for worker in hanging:
                    unsaved = worker.copy_finished_state() or unsaved
                if unsaved is not None:
                    self._hooks.save(*unsaved)
                    log.info("saved step %d before ending", unsaved[0].step)
            except Exception as error:  # the first cause must stay the first
                log.warning("no last checkpoint: %s", error)

        thread = threading.Thread(target=save, name="checkpoint", daemon=True)
        thread.start()
        thread.join(SAVE_SECONDS)
        return not thread.is_alive()


def _is_training(workers: list[Worker]) -> bool:
    """Whether a drafter is still inside a step; one that copies or saves its state takes the time that it needs."""
    return any(
        isinstance(worker, DrafterWorker) and worker.is_alive() and not worker.saving.is_set() for worker in workers
    )


def _only_broken_exchanges(shared: Shared) -> bool:
    return all(isinstance(error, ExchangeError) for _, error in shared.failures)
