"""Starts a new run from the newest checkpoint of an ended one, with its code, configuration and environment.

What has changed in the container since is reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

from pydantic import BaseModel

from dflash_ops.errors import ConfigurationError
from dflash_ops.inventory.models import JobEntry
from dflash_ops.plan.check import check
from dflash_ops.plan.config import changed
from dflash_ops.plan.interpreter import Interpreter, interpreter
from dflash_ops.plan.plan import Plan, Wait, Wish, assemble, automatic_name, needs_gpus
from dflash_ops.plan.release import pack, trainer_source
from dflash_ops.plan.variables import resolve_variables
from dflash_ops.remote.protocol import OneRun
from dflash_ops.run.facts import read_facts
from dflash_ops.run.record import RunSpec, check_run_name
from dflash_ops.text import visible
from dflash_ops.verbs.diff import compare_facts
from dflash_ops.verbs.launch import LaunchReport, execute
from dflash_ops.verbs.session import Session, parsed

# What the number of steps follows from.
_LONGER = re.compile(
    r"(data|optimizer|optimizer\.max_steps|optimizer\.gradient_accumulation_steps|data\..*)=", re.DOTALL
)


@dataclass(frozen=True)
class ResumeOptions:
    """What may be asked of a resume."""

    run: str  # the one that ended
    name: str | None = None  # of the new run
    set: tuple[str, ...] = ()
    current_code: bool = False  # the trainer as it is here now, not as the run had it
    wait: Wait = "started"
    timeout: float = 120.0


class _Left(BaseModel):
    spec: RunSpec
    checkpoint: str
    step: int
    total: int | None
    then: dict[str, Any] | None
    now: dict[str, Any]


def resume(session: Session, options: ResumeOptions) -> LaunchReport:
    """Start the new run. Raises DflashError."""
    request: OneRun = {"root": session.root, "run": check_run_name(options.run)}
    found = parsed(_Left, session.call("resume", request).value)
    _refuse_finished(found, session.inventory.jobs.get(found.spec.job), options)
    session.say(f"going on from {visible(found.checkpoint)} of {options.run}")
    if found.then is not None:
        then, now = read_facts(found.then, f"run {options.run}"), read_facts(found.now, session.container_name)
        for one in compare_facts(then, now):
            if one.section == "cache" and one.b is not None:
                continue  # it grew, as it does in every run
            old, new = (value if value is not None else "none" for value in (one.a, one.b))
            session.say("  changed since: " + visible(f"{one.section} {one.key}: {old} -> {new}", 200))
    directory = str(session.paths.run(options.run).directory)
    report = execute(session, plan_resume(session, found.spec, directory, options))
    return report.model_copy(update={"kind": "resume"})


def _refuse_finished(found: _Left, job: JobEntry | None, options: ResumeOptions) -> None:
    """A run that did all its steps has nothing to go on with, unless --set makes it longer."""
    if found.total is None or found.step < found.total:
        return
    message = f"{options.run} has finished ({found.step}/{found.total}): there is nothing to go on with"
    if job is not None and job.source is not None:
        if options.set:
            return  # what makes other code's runs longer, only it knows
        raise ConfigurationError(message, "give what makes it longer by --set")
    optimizer = changed(found.spec.config, options.set).get("optimizer")
    most = optimizer.get("max_steps") if isinstance(optimizer, dict) else None
    limited = isinstance(most, int) and most <= found.total
    if not limited and any(_LONGER.match(change) for change in options.set):
        return
    key = "optimizer.max_steps" if limited else "data.epochs"
    raise ConfigurationError(message, f"`--set {key}=N` with a larger N makes it longer")


def plan_resume(session: Session, old: RunSpec, directory: str, options: ResumeOptions) -> Plan:
    """The old run's spec under a new name. Raises UsageError, ConfigurationError."""
    inventory = session.inventory
    name = check_run_name(options.name) if options.name is not None else automatic_name(old.job)
    release = None
    if options.current_code:
        job = _job(session, old)
        source = inventory.resolve(job.source) if job is not None and job.source else trainer_source()
        release = pack(source, job.include if job is not None else ())
    config = changed(old.config, options.set)
    # Only the trainer that stands here can be asked, and only what is new needs it.
    if options.set and (release.name if release is not None else old.release) == pack(trainer_source()).name:
        check(config, options.set, lambda _: f"the configuration of run {options.run}")
    code = release.name if release is not None else old.release
    wish = Wish(name, old.job, session.container_name, code, config, old.watchdog, directory)
    asked = assemble(session.paths, wish, _interpreter(session, old), release, _variables(session, old))
    needed = needs_gpus(inventory.jobs.get(old.job))
    return replace_fields(asked, needs_gpus=needed, wait=options.wait, timeout=options.timeout)


def _interpreter(session: Session, old: RunSpec) -> Interpreter:
    """The very same one. A locked environment that is gone is built again if the inventory still has its lock file."""
    if old.lock is not None and old.environment in session.inventory.environments:
        current = interpreter(session.inventory, old.environment, session.paths)
        if current.lock == old.lock:
            return current
    return Interpreter(old.environment, old.python, old.lock)


def _job(session: Session, old: RunSpec) -> JobEntry | None:
    """The run's job in the inventory, None when it is gone. Raises ConfigurationError.

    Which job it was, only the container says. One that has fallen into wrong hands could name any, and would be sent
    that job's secrets and code: so the inventory must say that the job may run there.
    """
    inventory, container = session.inventory, session.container_name
    job = inventory.jobs.get(old.job)
    # With a single container there is nowhere else that a job could be meant for.
    if job is not None and container not in (
        job.containers or (inventory.containers if len(inventory.containers) == 1 else ())
    ):
        raise ConfigurationError(
            f"{container} says that the run is one of job {old.job}, which the inventory does not give to {container}",
            f"if it is right, add {container} to the job's `containers`",
        )
    return job


def _variables(session: Session, old: RunSpec) -> dict[str, str]:
    """Values are read here once more: only their names were kept."""
    if not old.variables:
        return {}
    job = _job(session, old)
    if job is None:
        raise ConfigurationError(
            f"the run had variables ({visible(', '.join(old.variables))}) of job {visible(old.job)}, "
            "which the inventory no longer has",
            "put the job back, with its `env`",
        )
    return resolve_variables(old.job, job)
