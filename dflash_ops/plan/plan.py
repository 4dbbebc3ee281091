"""Works out a launch: run, unit, files and spec. Reads only files and variables of this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any, Literal

from dflash_ops.errors import UsageError
from dflash_ops.inventory.models import Inventory, JobEntry
from dflash_ops.plan.check import check_job
from dflash_ops.plan.config import job_config
from dflash_ops.plan.interpreter import Interpreter, interpreter
from dflash_ops.plan.release import Release, pack, trainer_source
from dflash_ops.plan.unit import base_environment, entry_script, env_file, on_exit_script, systemd_run_argv
from dflash_ops.plan.variables import resolve_variables
from dflash_ops.remote.protocol import Spec
from dflash_ops.run.probes.gpu import roles_of
from dflash_ops.run.record import GpuRoles, RootPaths, check_run_name, launched_by

Wait = Literal["none", "started", "step"]


@dataclass(frozen=True)
class LaunchOptions:
    """What may be asked of a launch; None follows the job."""

    job: str | None = None
    run: str | None = None
    set: tuple[str, ...] = ()
    wait: Wait | None = None
    timeout: float | None = None
    replace: bool = False


@dataclass(frozen=True)
class Wish:
    """What launch and resume each decide about a run; `assemble` adds the rest."""

    run: str
    job: str
    container: str
    release: str  # its name
    config: dict[str, Any]
    watchdog: int | None = None
    resumed_from: str | None = None
    foreign: bool = False  # another trainer than ours: without a `pipeline` it is not known to use any GPU


@dataclass(frozen=True)
class Plan:
    """All that a launch sends, worked out before anything is connected."""

    run: str
    release_name: str
    release: Release | None  # None: it must be in the container already
    interpreter: Interpreter
    config: dict[str, Any]
    gpus: GpuRoles
    spec: Spec
    argv: list[str]
    entry: str
    on_exit: str
    env: str = field(repr=False)  # may hold secrets
    variables: list[str] = field(default_factory=list)
    needs_gpus: bool = False  # it does not start where one of `gpus` is missing
    wait: Wait = "started"
    timeout: float = 120.0


def plan(inventory: Inventory, container: str, roots: RootPaths, options: LaunchOptions) -> Plan:
    """Work out a launch. Raises UsageError, ConfigurationError."""
    name, job = inventory.job(options.job)
    if job.containers is not None and container not in job.containers:
        hint = f"give --container {job.containers[0]}, or add {container} to the job's `containers`"
        raise UsageError(f"the job {name} may not run on {container}", hint)
    run = check_run_name(options.run) if options.run is not None else automatic_name(name)
    config = job_config(inventory, name, job, options.set)
    if job.source is None:  # of other code only the container can tell
        check_job(config, inventory, name, job, options.set)
    release = pack(inventory.resolve(job.source) if job.source else trainer_source(), job.include)
    foreign = job.source is not None
    # Another trainer is not known to speak to the watchdog, and would be aborted though it is well.
    watchdog = None if foreign and "watchdog" not in job.model_fields_set else job.watchdog
    wish = Wish(run, name, container, release.name, config, watchdog, foreign=foreign)
    python = interpreter(inventory, job.environment, roots)
    asked = assemble(roots, wish, python, release, resolve_variables(name, job))
    timeout = options.timeout if options.timeout is not None else job.timeout
    return replace_fields(asked, needs_gpus=needs_gpus(job), wait=options.wait or job.wait, timeout=timeout)


def needs_gpus(job: JobEntry | None) -> bool:
    """Whether `cuda:3` must be there: only our own trainer is known to mean a GPU by it, and its number unless the
    job numbers GPUs itself.
    """
    return job is None or (job.source is None and "CUDA_VISIBLE_DEVICES" not in job.env)


def assemble(
    roots: RootPaths,
    wish: Wish,
    python: Interpreter,
    release: Release | None,
    variables: Mapping[str, str],
) -> Plan:
    """The unit, its files and its spec."""
    run, config = wish.run, wish.config
    paths = roots.run(run)
    gpus = GpuRoles() if wish.foreign and "pipeline" not in config else roles_of(GpuRoles(), config)
    base = base_environment(run, paths, str(roots.compile_cache), str(roots.compile_cache.parent))
    folder = f"{roots.releases}/{wish.release}"
    return Plan(
        run=run,
        release_name=wish.release,
        release=release,
        interpreter=python,
        config=dict(config),
        gpus=gpus,
        spec={
            "schema": 1,
            "run": run,
            "job": wish.job,
            "container": wish.container,
            "launched_by": launched_by(),
            "release": wish.release,
            "environment": python.environment,
            "python": python.path,
            "lock": python.lock,
            "config": config,
            "gpus": {"target": gpus.target, "drafters": gpus.drafters},
            "watchdog": wish.watchdog,
            "resumed_from": wish.resumed_from,
            "variables": sorted(variables),
        },
        argv=systemd_run_argv(run, paths, wish.watchdog, gpus.all),
        entry=entry_script(paths, folder, python.path, wish.resumed_from),
        on_exit=on_exit_script(run, paths),
        env=env_file(base, variables),
        variables=sorted(variables),
    )


def automatic_name(job: str, now: float | None = None) -> str:
    """`<job>-<date>-<time>` by this machine's clock, within the rule of run names."""
    word = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:40].strip("-") or "run"
    return f"{word}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
