"""Shows the answers of the verbs in plain lines; needs no Rich."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dflash_ops.plan.config import dump_yaml
from dflash_ops.text import age, counted, size, visible

if TYPE_CHECKING:
    from dflash_ops.plan.plan import Plan
    from dflash_ops.plan.release import Release
    from dflash_ops.run.status import Status
    from dflash_ops.verbs.checkpoint import Saved
    from dflash_ops.verbs.env import BuildReport, EnvironmentList, EnvironmentUses
    from dflash_ops.verbs.gc import GcReport
    from dflash_ops.verbs.kill import KillReport
    from dflash_ops.verbs.launch import LaunchReport
    from dflash_ops.verbs.pull import Pulled
    from dflash_ops.verbs.push import Pushed
    from dflash_ops.verbs.report import Reported
    from dflash_ops.verbs.trust import TrustReport
    from dflash_ops.verbs.wait import Waited


def verdict_line(status: Status) -> str:
    """`run r7 failed: exit 1 after 2m (CUDA out of memory)`."""
    return f"run {status.run} {status.state}" + (f": {status.reason}" if status.reason else "")


def show_launch(report: LaunchReport) -> None:
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


def show_plan(asked: Plan) -> None:
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
    if asked.release is not None:
        _show_release(asked.release)


def _show_release(release: Release) -> None:
    """Each file that is shipped with its size, and what is left out."""
    print(f"\n--- release: {counted(len(release.files), 'file')}, {size(release.total_bytes)}")
    for file in release.files:
        print(f"{size(file.size):>10}  {visible(file.path)}")
    for names, why in ((release.ignored, "git ignores it"), (release.hidden, "hidden")):
        for name in names:
            print(f"{'left out':>10}  {visible(name)}  ({why})")


def show_kill(report: KillReport) -> None:
    """The end, and what became of the GPUs' memory."""
    words = {
        "stopped": "has stopped",
        "killed": "was killed by SIGKILL",
        "already-ended": f"had ended already: {report.verdict.state}",
    }
    reason = f" ({visible(report.verdict.reason)})" if report.verdict.reason else ""
    print(f"{report.run} {words[report.outcome]}{reason}")
    for gpu in report.gpus:
        before, after = (f"{value:g} MiB" if value is not None else "unknown" for value in (gpu.before, gpu.after))
        print(f"  GPU {gpu.index}: {before} in use before, {after} now")


def show_gc(report: GcReport) -> None:
    """A line for each folder, the largest first."""
    for item in sorted(report.items, key=lambda each: -each.bytes):
        print(f"{size(item.bytes):>10}  {item.kind:<11}  {visible(item.path)}  ({visible(item.why)})")
    if not report.items:
        print(f"there is nothing to remove in {report.container}")
    elif report.removed:
        print(f"{size(report.bytes)} freed in {report.container}")
    else:
        print(f"{size(report.bytes)} can be removed from {report.container}")


def show_trust(report: TrustReport) -> None:
    """What was written, and where."""
    for key in report.accepted:
        print(f"{key.host} {key.kind} {key.fingerprint} -> {key.known_hosts}")
    if not report.accepted:
        print(f"{report.host}: its key was known already, and is the same")
    if not report.logged_in:
        print("  it refused your own key, though: set `identity` and `user` of the host")


def show_env_list(listed: EnvironmentList) -> None:
    """A line for each."""
    for entry in listed.built:
        name = ", ".join(entry.environments) or f"({visible(entry.name or '?')}, another lock file)"
        built = f"built {age(time.time() - entry.built)} ago" if entry.built else "unfinished"
        packages = "? packages" if entry.packages is None else counted(entry.packages, "package")
        about = f"Python {visible(entry.python or '?')}, {packages}, {size(entry.bytes)}"
        print(f"{entry.lock[:12]}  {name}: {about}, {built}, {counted(len(entry.runs), 'run')}")
    for name in listed.not_built:
        print(f"{'not built':12}  {name}: `dflash env build {name}` builds it")
    for name, path in listed.interpreters.items():
        print(f"{'interpreter':12}  {name}: {visible(path)}, {counted(len(listed.interpreter_runs[name]), 'run')}")


def show_wait(answer: Waited) -> None:
    """Print it."""
    goal = {"started": "is running", "step": "has done its first step", "finished": "succeeded"}[answer.goal]
    took = f"(waited {age(answer.seconds)})"
    if answer.reached:
        print(f"run {answer.status.run} {goal} {took}")
    else:
        print(f"{verdict_line(answer.status)} {took}")


def show_checkpoint(answer: Saved) -> None:
    """Print it."""
    print(f"run {answer.run} saved {answer.checkpoint.name} (step {answer.checkpoint.step}) in {answer.seconds:.1f} s")


def show_pull(answer: Pulled) -> None:
    """Print it."""
    for path in answer.files:
        print(f"{answer.folder}/{path}")
    for name in answer.kept:
        print(f"{answer.folder}/checkpoints/{name} was already here")
    for name in answer.vanished:
        print(f"{name} was deleted by the trainer while it was pulled (checkpoint.keep_last says how many stay)")
    for name in answer.refused:
        print(f"left out because of its name: {name}")


def show_push(answer: Pushed) -> None:
    """Print it."""
    for path in answer.files:
        print(f"{answer.container}:{answer.folder}/{path}")
    for path in answer.kept:
        print(f"{answer.container}:{answer.folder}/{path} was already there")


def show_report(answer: Reported) -> None:
    """The file, and what it has no diagram of."""
    print(answer.file)
    for line in answer.missing:
        print(f"not drawn: {line}")


def show_env_build(report: BuildReport) -> None:
    """What became of the build, and where the environment is."""
    print(f"{report.environment}: {report.state}, {report.path}")


def show_env_uses(report: EnvironmentUses) -> None:
    """A run a line."""
    print("\n".join(report.runs) or "no run")
