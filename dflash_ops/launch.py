"""How is a run started? Planned here, checked, shipped and started in the container, and watched until it is true."""

from __future__ import annotations

import difflib
import getpass
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field

from dflash_ops.document import Document
from dflash_ops.environment import Interpreter, build_locked, interpreter
from dflash_ops.errors import ConfigurationError, DflashError, Exit, UsageError
from dflash_ops.inventory import GpuEntry, Inventory, JobEntry, home_expanded, read_yaml
from dflash_ops.probes.gpu import roles_of
from dflash_ops.probes.snapshot import Snapshot, read_snapshot
from dflash_ops.progress import transfer_bar
from dflash_ops.release import Release, pack, trainer_source
from dflash_ops.run import GpuRoles, RootPaths, check_run_name, unit_name
from dflash_ops.seen import remember
from dflash_ops.session import Session, parsed
from dflash_ops.text import size, visible
from dflash_ops.training import check_job
from dflash_ops.transport.base import ConnectionLost, RemoteRefusal, Unanswered
from dflash_ops.unit import base_environment, entry_script, env_file, on_exit_script, systemd_run_argv
from dflash_ops.verdict import Failed, Succeeded, Verdict, judge

Wait = Literal["none", "started", "step"]
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


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
class Plan:
    """All that a launch sends, worked out before anything is connected."""

    run: str
    release_name: str
    release: Release | None  # None: it must be in the container already
    interpreter: Interpreter
    config: dict[str, Any]
    gpus: GpuRoles
    spec: dict[str, Any]
    argv: list[str]
    entry: str
    on_exit: str
    env: str = field(repr=False)  # may hold secrets
    variables: list[str] = field(default_factory=list)
    needs_gpus: bool = False  # it does not start where one of `gpus` is missing
    wait: Wait = "started"
    timeout: float = 120.0


class LaunchReport(Document):
    """What a launch achieved."""

    run: str
    target: str
    unit: str
    reached: Literal["none", "started", "step", "ended"]
    verdict: Verdict
    release: str
    invocation_id: str | None
    seconds: float = Field(description="From the command to its answer")
    round_trips: int = Field(description="Programs run in the container")


class _Preflight(BaseModel):
    release: Literal["present", "missing", "damaged"]
    environment_missing: bool


class _Started(BaseModel):
    reached: Literal["none", "started", "step", "ended", "timeout"]
    snapshot: dict[str, Any]


class LaunchFailed(DflashError):
    """The run was started and did not live."""


def launch(session: Session, options: LaunchOptions) -> LaunchReport:
    """Start a run. Raises DflashError saying why there is none, or why it died."""
    return execute(session, plan(session.inventory, session.target_name, session.paths, options), options.replace)


def execute(session: Session, asked: Plan, replace: bool = False) -> LaunchReport:
    """Do what a plan says."""
    begin = time.monotonic()
    session.so_far = "nothing was started"
    _prepare(session, asked)
    try:
        reached, seen = _start(session, asked)
    except RemoteRefusal as refusal:
        if not replace or not refusal.reason.startswith("gpus-held:"):
            raise
        _stop_holder(session, check_run_name(refusal.reason.partition(":")[2]))
        reached, seen = _start(session, asked)
    verdict = judge(seen)
    remember(session.inventory.path, session.target_name, asked.run, verdict.state, verdict.reason)
    if isinstance(verdict, Failed) or (reached == "ended" and not isinstance(verdict, Succeeded)):
        words = {"cancelled": "was cancelled", "lost": "is lost"}.get(verdict.state, verdict.state)
        raise LaunchFailed(
            verdict.exit_code,
            f"the run {asked.run} {words}: {verdict.reason}",
            f"`dflash tail-logs {asked.run}` shows all of its log",
            lines=_last_lines(seen),
        )
    if reached == "timeout":
        what = "its first optimizer step" if asked.wait == "step" else "its first log line"
        raise DflashError(
            Exit.TEMPORARY,
            f"the run {asked.run} did not reach {what} within {asked.timeout:g} s; it goes on",
            f"`dflash status {asked.run}` looks again, `dflash kill {asked.run}` ends it",
            lines=_last_lines(seen),
        )
    started = seen.record.started
    return LaunchReport.model_validate(
        {
            "run": asked.run,
            "target": session.target_name,
            "unit": unit_name(asked.run),
            "reached": reached,
            "verdict": verdict,
            "release": asked.release_name,
            "invocation_id": started.invocation_id if started else None,
            "seconds": round(time.monotonic() - begin, 3),
            "round_trips": session.transport.round_trips,
        }
    )


def _prepare(session: Session, asked: Plan) -> None:
    """Check the container; bring there what it lacks."""
    session.say(f"checking {session.target_name}")
    locked = asked.interpreter.lock is not None
    request = {
        "run": asked.run,
        "gpus": asked.gpus.all if asked.needs_gpus else [],
        "release": asked.release_name,
        "python": asked.interpreter.path,
        "locked": locked,
    }
    try:
        found = parsed(_Preflight, session.call("preflight", request, deadline=60).value)
    except RemoteRefusal as refusal:
        if refusal.reason == "no-python":  # the container does not know which file says so
            refusal.hint = (
                f"correct `python` of environment {asked.interpreter.environment} in {session.inventory.path}"
            )
        raise
    if found.environment_missing:
        build_locked(session, asked.interpreter)
        session.so_far = "nothing was started"
    if found.release != "present":
        if asked.release is None:
            raise ConfigurationError(
                f"the release {asked.release_name} is {found.release} in {session.target_name}",
                "resume with --current-code, or launch anew",
            )
        session.say(f"sending release {asked.release.name[:12]} ({size(asked.release.total_bytes)})")
        request = {"shelf": "releases", "name": asked.release.name, "files": asked.release.manifest()}
        with transfer_bar("release", asked.release.total_bytes, quiet=session.quiet) as advance:
            session.call("store", request, asked.release.contents(advance), deadline=600)


def _start(session: Session, asked: Plan) -> tuple[str, Snapshot]:
    request = {
        "run": asked.run,
        "spec": asked.spec,
        "files": {
            "config.yaml": dump_yaml(asked.config),
            "entry": asked.entry,
            "on-exit": asked.on_exit,
            "env": asked.env,
        },
        "argv": asked.argv,
        "facts": {
            "root": session.root,
            "python": asked.interpreter.path,
            "release": f"{session.paths.releases}/{asked.release_name}",
            "variables": asked.variables,
        },
        "wait": asked.wait,
        "timeout": asked.timeout,
    }
    words = {"facts": "reading the container's facts", "start": f"starting {asked.run}"}
    try:
        for frame in session.stream("start", request, deadline_between_frames=60):
            if frame.kind == "result":
                answer = parsed(_Started, frame.value)
                return answer.reached, read_snapshot(answer.snapshot)
            stage = str(frame.value.get("stage"))
            if stage == "start":
                session.so_far = f"{asked.run} may have been started; `dflash status {asked.run}` tells"
            elif stage == "started":
                session.so_far = (
                    f"{asked.run} goes on; `dflash status {asked.run}` looks, `dflash kill {asked.run}` ends it"
                )
            if stage in words:
                session.say(words[stage])
            if frame.value.get("status"):
                session.say("  " + visible(str(frame.value["status"]), 200))
    except (ConnectionLost, Unanswered) as error:
        # What was sent may have been carried out: a new try under the same name can never make a second run.
        error.hint = f"the run may have been started: `dflash status {asked.run}` tells; it goes on without us"
        raise
    raise AssertionError("a stream ends with a result or an error")


def _stop_holder(session: Session, run: str) -> None:
    from dflash_ops.kill import KillOptions, kill

    session.say(f"stopping {run}, which holds the GPUs")
    kill(session, KillOptions(run=run))
    session.so_far = f"{run} was stopped, and nothing was started"


def _last_lines(seen: Snapshot) -> tuple[str, ...]:
    lines = getattr(seen.log, "lines", ())
    return tuple(visible(line, 500) for line in lines[-15:])


# ---- planning: pure but for reading files and variables of this machine ------------------------------------


def plan(inventory: Inventory, target: str, roots: RootPaths, options: LaunchOptions) -> Plan:
    """Work out a launch. Raises UsageError, ConfigurationError."""
    name, job = inventory.job(options.job)
    if job.targets is not None and target not in job.targets:
        hint = f"give --target {job.targets[0]}, or add {target} to the job's `targets`"
        raise UsageError(f"the job {name} may not run on {target}", hint)
    run = check_run_name(options.run) if options.run is not None else automatic_name(name)
    config = job_config(inventory, name, job, options.set)
    if job.source is None:  # of other code only the container can tell
        check_job(config, inventory, name, job, options.set)
    release = pack(inventory.resolve(job.source) if job.source else trainer_source())
    spec = {
        "schema": 1,
        "run": run,
        "job": name,
        "target": target,
        "launched_by": launched_by(),
        "release": release.name,
        "config": config,
        "watchdog": job.watchdog,
        "resumed_from": None,
    }
    python = interpreter(inventory, job.environment, roots)
    asked = assemble(roots, spec, python, release, resolve_variables(name, job))
    timeout = options.timeout if options.timeout is not None else job.timeout
    return replace_fields(asked, needs_gpus=needs_gpus(job), wait=options.wait or job.wait, timeout=timeout)


def needs_gpus(job: JobEntry | None) -> bool:
    """Whether `cuda:3` must be there: only our own trainer is known to mean a GPU by it, and its number unless the
    job numbers GPUs itself.
    """
    return job is None or (job.source is None and "CUDA_VISIBLE_DEVICES" not in job.env)


def assemble(
    roots: RootPaths,
    spec: Mapping[str, Any],
    python: Interpreter,
    release: Release | None,
    variables: Mapping[str, str],
) -> Plan:
    """The unit and its files for a spec, which is completed by what the other arguments say."""
    run, config = str(spec["run"]), spec["config"]
    paths = roots.run(run)
    gpus = roles_of(GpuRoles(), config)
    base = base_environment(run, paths, str(roots.compile_cache), str(roots.compile_cache.parent))
    folder = f"{roots.releases}/{spec['release']}"
    return Plan(
        run=run,
        release_name=str(spec["release"]),
        release=release,
        interpreter=python,
        config=dict(config),
        gpus=gpus,
        spec={
            **spec,
            "environment": python.environment,
            "python": python.path,
            "lock": python.lock,
            "gpus": gpus.model_dump(),
            "variables": sorted(variables),
        },
        argv=systemd_run_argv(run, paths, spec["watchdog"]),
        entry=entry_script(paths, folder, python.path, spec["resumed_from"]),
        on_exit=on_exit_script(run, paths),
        env=env_file(base, variables),
        variables=sorted(variables),
    )


def automatic_name(job: str, now: float | None = None) -> str:
    """`<job>-<date>-<time>` by this machine's clock, within the rule of run names."""
    word = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:40].strip("-") or "run"
    return f"{word}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def launched_by() -> str:
    """`user@machine`, printable."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "?"
    return visible(f"{user}@{socket.gethostname()}", 100)


def job_config(inventory: Inventory, name: str, job: JobEntry, changes: tuple[str, ...]) -> dict[str, Any]:
    """The trainer's configuration: the job's, its GPUs, its `set`, then --set. The last word wins."""
    given: Any = job.config
    if isinstance(given, Path):
        path = inventory.resolve(given)
        try:
            given, _ = read_yaml(path.read_bytes(), path)
        except OSError as error:
            raise ConfigurationError(
                f"cannot read the configuration {path} of job {name}: {error.strerror}", "correct `config` of the job"
            ) from error
        if not isinstance(given, dict):
            raise ConfigurationError(f"{path}:1: the configuration must be a mapping", "begin with `target:`")
    config: dict[str, Any] = _copied(given)
    if job.gpus is not None:
        _set_gpus(config, job.gpus)
    for key, value in job.set.items():
        set_dotted(config, key, value)
    odd = _not_plain(config)
    if odd:
        raise ConfigurationError(f"the configuration of job {name} cannot hold {odd}", "put it in quotes to mean text")
    return changed(config, changes)


def changed(given: Mapping[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """A configuration with the changes of --set made. Raises UsageError."""
    config: dict[str, Any] = _copied(given)
    for change in changes:
        key, found, text = change.partition("=")
        if not found:
            raise UsageError(f"--set {change!r} has no `=`", "write --set optimizer.lr=1e-4")
        set_dotted(config, key, parse_value(text, key))
    return config


def _not_plain(value: Any, where: str = "") -> str:
    """What of a configuration is neither text, number, truth value nor null, in words: YAML also has dates and sets."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"the key {key!r}{' in `' + where + '`' if where else ''}, which is no text"
            found = _not_plain(item, f"{where}.{key}" if where else key)
            if found:
                return found
    elif isinstance(value, list):
        return next(filter(None, (_not_plain(item, where) for item in value)), "")
    elif not (value is None or isinstance(value, str | int | float)):
        return f"a {type(value).__name__} as `{where}`"
    return ""


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _set_gpus(config: dict[str, Any], gpus: GpuEntry) -> None:
    for role, indices in (("targets", gpus.target), ("drafters", gpus.drafters)):
        if indices:
            set_dotted(config, f"pipeline.{role}", [f"cuda:{index}" for index in indices])


def set_dotted(config: dict[str, Any], key: str, value: Any) -> None:
    """`optimizer.lr` in nested mappings, made where they are missing. Raises UsageError."""
    parts = key.split(".")
    if not all(parts) or not key.isprintable():
        raise UsageError(f"{key!r} is no key of the configuration", "write it like optimizer.lr")
    here = config
    for depth, part in enumerate(parts[:-1]):
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f"`{'.'.join(parts[: depth + 1])}` is a value, not a section: {key!r} cannot be set in it")
        here = inner
    here[parts[-1]] = value


def parse_value(text: str, key: str) -> Any:
    """A YAML value; numbers such as 1e-4, which YAML 1.1 takes for text, are numbers. Raises UsageError."""
    if _NUMBER.fullmatch(text) and not re.fullmatch(r"[-+]?\d+", text):
        return float(text)
    try:
        value = yaml.safe_load(text)
        odd = _not_plain(value, key)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the value of --set {key} is not YAML", "put text with special characters in quotes"
        ) from error
    if odd:
        raise UsageError(f"the configuration cannot hold {odd}", f"write --set '{key}=\"{text}\"' to mean text")
    return value


def dump_yaml(config: Mapping[str, Any]) -> str:
    """YAML that reads back as the same values."""
    # Escapes instead of characters beyond ASCII: PyYAML writes some of these in a way that it does not read back.
    return yaml.safe_dump(dict(config), sort_keys=False, width=120)


def resolve_variables(name: str, job: JobEntry) -> dict[str, str]:
    """The job's variables with `env:` and `file:` references read. Values may be secrets. Raises ConfigurationError."""
    found = {}
    for key, value in job.env.items():
        if value.startswith("env:"):
            source = value.removeprefix("env:")
            if source not in os.environ:
                near = difflib.get_close_matches(source, os.environ, 1)
                hint = f"did you mean {near[0]}?" if near else f"`export {source}=…` first"
                raise ConfigurationError(f"job {name} needs the variable {source}, which is not set here", hint)
            found[key] = os.environ[source]
        elif value.startswith("file:"):
            path = home_expanded(Path(value.removeprefix("file:")))
            try:
                found[key] = path.read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ConfigurationError(f"job {name} needs the file {path}: {why}", f"correct `env.{key}`") from error
        else:
            found[key] = value
        if any("\ud800" <= letter <= "\udfff" for letter in found[key]):  # how Python holds bytes that are no UTF-8
            raise ConfigurationError(f"the variable {key} of job {name} is not UTF-8 text", "encode it, e.g. in base64")
        if "\0" in found[key]:
            raise ConfigurationError(f"the variable {key} of job {name} holds a NUL byte", "variables cannot")
    return found


# ---- showing -----------------------------------------------------------------------------------------------


def render(report: LaunchReport) -> None:
    """What was reached, and what one may type next."""
    reached = {
        "none": "handed to systemd",
        "started": "runs, and its log has begun",
        "step": "runs, and did its first optimizer step",
        "ended": "has ended: " + report.verdict.state,
    }[report.reached]
    reason = f" ({visible(report.verdict.reason)})" if report.verdict.reason else ""
    print(f"{report.run} {reached}{reason}")
    for verb in ("status", "tail-logs", "kill"):
        print(f"  dflash {verb} {report.run}")


def render_plan(asked: Plan) -> None:
    """What --dry-run shows: everything but the values of variables."""
    print(f"run         {asked.run}")
    print(f"release     {asked.release_name}")
    print(f"interpreter {visible(asked.interpreter.path)}")
    print(f"variables   {', '.join(asked.variables) or '-'}")
    print(f"gpus        target {asked.gpus.target or '-'}, drafters {asked.gpus.drafters or '-'}")
    for title, text in (
        ("systemd-run", " ".join(asked.argv)),
        ("entry", asked.entry),
        ("config.yaml", dump_yaml(asked.config)),
    ):
        print(f"\n--- {title}")
        print("\n".join(visible(line) for line in text.splitlines()))
