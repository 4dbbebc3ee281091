"""Starts a run and waits until it is confirmed."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document
from dflash_ops.errors import ConfigurationError, DflashError, Exit
from dflash_ops.plan.config import dump_yaml
from dflash_ops.plan.plan import LaunchOptions, Plan, plan
from dflash_ops.progress import progress_bar
from dflash_ops.remote.protocol import RUN_FILES, LaunchRequest, PreflightRequest, StoreRequest, unit_name
from dflash_ops.run.last_known import remember
from dflash_ops.run.probes.snapshot import Snapshot, read_snapshot
from dflash_ops.run.record import check_run_name
from dflash_ops.run.verdict import Failed, Succeeded, Verdict, judge
from dflash_ops.text import size, visible
from dflash_ops.transport.base import ConnectionLost, RemoteRefusal, Unanswered, result_of
from dflash_ops.verbs.env import build_locked
from dflash_ops.verbs.session import Session, parsed


class LaunchReport(Document):
    """What a launch achieved."""

    kind: Literal["launch", "resume"] = "launch"
    run: str
    container: str
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
    return execute(session, plan(session.inventory, session.container_name, session.paths, options), options.replace)


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
    remember(session.inventory.path, session.container_name, asked.run, verdict.state, verdict.reason)
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
            "container": session.container_name,
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
    if asked.release is not None and asked.release.hidden:
        named = ", ".join(visible(name, 80) for name in asked.release.hidden[:8])
        more = f" and {len(asked.release.hidden) - 8} more" if len(asked.release.hidden) > 8 else ""
        session.say(f"left out of the release: {named}{more} (hidden; `include` of the job ships them)")
    session.say(f"checking {session.container_name}")
    locked = asked.interpreter.lock is not None
    request: PreflightRequest = {
        "root": session.root,
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
                f"the release {asked.release_name} is {found.release} in {session.container_name}",
                "resume with --current-code, or launch anew",
            )
        session.say(f"sending release {asked.release.name[:12]} ({size(asked.release.total_bytes)})")
        upload: StoreRequest = {
            "root": session.root,
            "shelf": "releases",
            "name": asked.release.name,
            "files": asked.release.manifest(),
        }
        with progress_bar("release", quiet=session.quiet) as progress:
            progress.total(asked.release.total_bytes, 0)
            session.call("store", upload, asked.release.contents(progress.advance), deadline=600)


def _start(session: Session, asked: Plan) -> tuple[str, Snapshot]:
    request: LaunchRequest = {
        "root": session.root,
        "run": asked.run,
        "spec": asked.spec,
        "files": {
            RUN_FILES["config"]: dump_yaml(asked.config),
            RUN_FILES["entry"]: asked.entry,
            RUN_FILES["on_exit"]: asked.on_exit,
            RUN_FILES["env"]: asked.env,
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
    try:
        frames = session.stream("launch", request, deadline_between_frames=60)
        answer = parsed(_Started, result_of(frames, lambda frame: _say(session, asked.run, frame.value)))
    except (ConnectionLost, Unanswered) as error:
        # What was sent may have been carried out: a new try under the same name can never make a second run.
        error.hint = f"the run may have been started: `dflash status {asked.run}` tells; it goes on without us"
        raise
    return answer.reached, read_snapshot(answer.snapshot)


def _say(session: Session, run: str, event: dict[str, Any]) -> None:
    stage = event.get("stage")
    if stage == "facts":
        session.say("reading the container's facts")
    elif stage == "start":
        session.so_far = f"{run} may have been started; `dflash status {run}` tells"
        session.say(f"starting {run}")
    elif stage == "started":
        session.so_far = f"{run} goes on; `dflash status {run}` looks, `dflash kill {run}` ends it"
    if event.get("status"):
        session.say("  " + visible(str(event["status"]), 200))


def _stop_holder(session: Session, run: str) -> None:
    from dflash_ops.verbs.kill import KillOptions, kill

    session.say(f"stopping {run}, which holds the GPUs")
    kill(session, KillOptions(run=run))
    session.so_far = f"{run} was stopped, and nothing was started"


def _last_lines(seen: Snapshot) -> tuple[str, ...]:
    lines = getattr(seen.log, "lines", ())
    return tuple(visible(line, 500) for line in lines[-15:])
