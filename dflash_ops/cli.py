"""Defines what can be typed: options in, a rendered answer out. No logic, and nothing heavy imported at the top.

Annotations are evaluated here, not kept as text: Typer would compile those of every command each time.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dflash_ops.errors import DflashError, Exit, UsageError
from dflash_ops.options import (
    Common,
    ContainerOption,
    JsonOption,
    RunArgument,
    confirm,
    finite,
    known,
    known_runs,
    session,
    show,
)
from dflash_ops.streams import no_reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_ops.transport.known_hosts import UnknownKey


class Verbs(TyperGroup):
    """All verbs. Maps a closed pipe and Ctrl-C to our exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """See click."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            no_reader()
        except (KeyboardInterrupt, typer.Abort) as error:
            done = Common.so_far if Common.session is None else Common.session.so_far
            raise DflashError(Exit.INTERRUPTED, f"interrupted: {done}") from error


class CommandEnded(Exception):
    """The command of `exec` ended with this status: the only exit code that is not one of `Exit`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


app = typer.Typer(
    name="dflash",
    cls=Verbs,
    help="Launch, watch and control DFlash training runs in an LXC container.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"dflash {version('dflash-ops')}")
        raise typer.Exit(Exit.OK)


@app.callback()
def _common(
    inventory: Annotated[
        Path | None, typer.Option("--inventory", help="Default: $DFLASH_INVENTORY, ./inventory.yaml")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and what remote programs said")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show it and exit", is_eager=True, callback=_version)
    ] = False,
) -> None:
    Common.inventory = inventory
    Common.debug = debug
    Common.json = False
    Common.session = None
    Common.so_far = "nothing was changed"


@app.command()
def launch(
    job: Annotated[
        str | None,
        typer.Argument(help="Default: the inventory's default job", metavar="JOB", autocompletion=known("jobs")),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: job and time")] = None,
    container: ContainerOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change the trainer's configuration, as optimizer.lr=1e-4")
    ] = None,
    wait: Annotated[
        Literal["none", "started", "step"] | None,
        typer.Option("--wait", help="Return once this is reached; default: the job's `wait`, else started"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="Seconds to wait for --wait; default: the job's `timeout`, else 120",
            min=0,
            callback=finite,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and connect to nothing")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Stop the run that holds the same GPUs first")] = False,
    json: JsonOption = False,
) -> None:
    """Start a run and return once it is confirmed running."""
    with session(container, json=json) as opened:
        from dflash_ops.plan.plan import LaunchOptions, plan
        from dflash_ops.show.answers import show_launch, show_plan
        from dflash_ops.verbs import launch as verb

        options = LaunchOptions(job, run, tuple(set_ or ()), wait, timeout, replace)
        asked = plan(opened.inventory, opened.container_name, opened.paths, options)
        if dry_run:
            if json:
                from json import dumps

                shipped = asked.release.document() if asked.release is not None else None
                document = {"schema": 1, "kind": "launch", "spec": asked.spec, "argv": asked.argv, "release": shipped}
                print(dumps(document, indent=2))
            else:
                show_plan(asked)
            return
        show(verb.execute(opened, asked, replace), json=json, render=show_launch)


@app.command()
def kill(
    run: RunArgument = None,
    container: ContainerOption = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds from SIGTERM to SIGKILL", min=0, callback=finite)
    ] = 45,
    force: Annotated[bool, typer.Option("--force", help="SIGKILL at once: no checkpoint is written")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    json: JsonOption = False,
) -> None:
    """Stop a run and return when it is gone. The trainer saves first."""
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_kill
        from dflash_ops.verbs import kill as verb
        from dflash_ops.verbs.status import look

        if not yes:
            found = look(opened, run)
            run = found.run  # the newest is chosen once
            if not found.verdict.finished:
                confirm(verb.question(found))
        show(verb.kill(opened, verb.KillOptions(run, grace, force)), json=json, render=show_kill)


@app.command()
def status(
    run: RunArgument = None,
    container: ContainerOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking, over one connection")] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with the run's state: 0 succeeded, 100 failed, 101 not finished, 103 cancelled, 104 lost",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the state of a run: its unit, log and GPUs, each probed separately, and the verdict."""
    if watch and json:
        raise UsageError("--watch draws a live view, --json prints one document", "use one of the two")
    with session(container, json=json) as opened:
        from dflash_ops.verbs import status as verb

        def shown() -> ModuleType:  # Rich, too, is imported while the container answers
            from dflash_ops.show import status as shown_status

            return shown_status

        if watch:
            answer = shown().show_watch(verb.watch(opened, run))
        else:
            answer = verb.status(opened, run, None if json else shown)
            show(answer, json=json, render=lambda status: shown().show_status(status))
        if exit_code:
            raise typer.Exit(answer.exit_code)


@app.command("tail-logs")
def tail_logs(
    run: RunArgument = None,
    container: ContainerOption = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Last lines (with --grep: last matches) to begin with")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Go on until the run ends")] = True,
    since: Annotated[str | None, typer.Option("--since", help="10m, 2h, 1d, or 2026-11-30T07:20:00Z")] = None,
    grep: Annotated[str | None, typer.Option("--grep", help="Only lines that match this regular expression")] = None,
) -> None:
    """Show a run's log. Reconnects by itself; Ctrl-C ends the view, not the run."""
    from dflash_ops.verbs import logs as verb

    begin = verb.parse_since(since) if since is not None else None
    pattern = verb.parse_grep(grep) if grep is not None else None
    if lines is None and begin is None and pattern is None:
        lines = 50
    with session(container) as opened:
        from dflash_ops.show.answers import verdict_line

        try:
            ended = verb.tail(opened, verb.TailOptions(run, lines, follow, begin, pattern), sys.stdout)
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.flush()
            opened.say(f"\ndetached: the run is not affected; `dflash tail-logs{f' {run}' if run else ''}` looks again")
            return
        if follow:
            opened.say(f"-- {verdict_line(ended)}")


@app.command()
def runs(
    container: ContainerOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Newest runs to show")] = 20,
    json: JsonOption = False,
) -> None:
    """List the runs of a container, newest first, each with its verdict."""
    with session(container, json=json) as opened:
        from dflash_ops.show.tables import show_runs
        from dflash_ops.verbs import runs as verb

        show(verb.runs(opened, count), json=json, render=show_runs)


@app.command()
def wait(
    run: RunArgument = None,
    container: ContainerOption = None,
    goal: Annotated[Literal["started", "step", "finished"], typer.Option("--for", help="The goal")] = "finished",
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds; default: for ever", min=0, callback=finite)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Wait for a run. Exits 0 once the goal is reached, else with the run's state.

    100 failed, 101 not finished, 103 cancelled, 104 lost.
    """
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_wait
        from dflash_ops.verbs import wait as verb

        answer = verb.wait(opened, verb.WaitOptions(run, goal, timeout))
        show(answer, json=json, render=show_wait)
        raise typer.Exit(answer.exit_code)


@app.command()
def checkpoint(
    run: RunArgument = None,
    container: ContainerOption = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for it", min=1, callback=finite)] = 600,
    json: JsonOption = False,
) -> None:
    """Ask a running trainer to save now and return when the checkpoint is complete."""
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_checkpoint
        from dflash_ops.verbs import checkpoint as verb

        show(verb.checkpoint(opened, run, timeout), json=json, render=show_checkpoint)


@app.command()
def pull(
    run: Annotated[str, typer.Argument(help="The run", metavar="RUN", autocompletion=known_runs)],
    container: ContainerOption = None,
    what: Annotated[
        Literal["checkpoints", "metrics", "log", "all"],
        typer.Option("--what", help="checkpoints, metrics, log or all", metavar="FILES"),
    ] = "checkpoints",
    to: Annotated[
        Path, typer.Option("--to", help="Folder for the files; they go into a folder of the run's name in it")
    ] = Path(),
    json: JsonOption = False,
) -> None:
    """Copy a run's files to this machine. Resumes a broken transfer and verifies each file by its hash."""
    with session(container, json=json) as opened:
        from dflash_ops.progress import progress_bar
        from dflash_ops.show.answers import show_pull
        from dflash_ops.verbs import pull as verb

        with progress_bar() as progress:
            answer = verb.pull(opened, verb.PullOptions(run, what, to), progress)
        show(answer, json=json, render=show_pull)


@app.command()
def push(
    files: Annotated[list[Path], typer.Argument(help="Files and folders of this machine", metavar="FILE...")],
    container: ContainerOption = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Folder of the container; default: `data` below its root", metavar="DIR")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace files that have other contents there")] = False,
    keep_mode: Annotated[
        bool, typer.Option("--keep-mode", help="Permissions as here; default: as readable as the folder there")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Bring data and models into the container: resumed where it broke off, verified, in place only when whole."""
    with session(container, json=json) as opened:
        from dflash_ops.progress import progress_bar
        from dflash_ops.show.answers import show_push
        from dflash_ops.verbs import push as verb

        with progress_bar() as progress:
            answer = verb.push(opened, verb.PushOptions(tuple(files), to, replace, keep_mode), progress)
        show(answer, json=json, render=show_push)


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs, or pulled folders (with a `/`)", metavar="RUN...", autocompletion=known_runs),
    ],
    container: ContainerOption = None,
    to: Annotated[Path | None, typer.Option("--to", help="The file; default: report-RUN.html here")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Show it live on 127.0.0.1 instead, until Ctrl-C")] = False,
    port: Annotated[int, typer.Option("--port", help="Of --serve; 0: any free one", min=0, max=65535)] = 0,
    json: JsonOption = False,
) -> None:
    """Write one HTML page of runs: curves, evaluation, compile report, facts, and what differs between them."""
    if serve and (json or to is not None):
        raise UsageError("--serve writes no file and prints no document", "leave out --json and --to")
    with ExitStack() as stack:
        from dflash_ops.show.answers import show_report
        from dflash_ops.verbs import report as verb

        Common.json = json
        opened = None if all(map(verb.is_folder, runs)) else stack.enter_context(session(container, json=json))
        if serve:
            verb.serve(opened, runs, port, lambda text: print(text, file=sys.stderr, flush=True))
        else:
            show(verb.report(opened, runs, to), json=json, render=show_report)


@app.command()
def doctor(
    container: Annotated[str | None, typer.Argument(help="Default: the inventory's", metavar="CONTAINER")] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", "-e", help="Default: the default job's, or the only one")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check everything between this machine and the GPUs; each line has its cure. Exits 78 if a check fails."""
    with session(container, json=json) as opened:
        from dflash_ops.show.tables import show_doctor
        from dflash_ops.verbs import doctor as verb

        answer = verb.doctor(opened, environment)
        show(answer, json=json, render=show_doctor)
        raise typer.Exit(answer.exit_code)


@app.command()
def diff(
    run_a: Annotated[str, typer.Argument(help="A run", metavar="RUN_A", autocompletion=known_runs)],
    run_b: Annotated[str, typer.Argument(help="Another", metavar="RUN_B", autocompletion=known_runs)],
    container: ContainerOption = None,
    json: JsonOption = False,
) -> None:
    """Show what differs between two runs: packages, driver, GPUs, code, configuration, data, cache, environment."""
    with session(container, json=json) as opened:
        from dflash_ops.show.tables import show_diff
        from dflash_ops.verbs import diff as verb

        show(verb.diff(opened, run_a, run_b), json=json, render=show_diff)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The run that ended", metavar="RUN", autocompletion=known_runs)],
    name: Annotated[str | None, typer.Option("--run", help="Name of the new run; default: job and time")] = None,
    container: ContainerOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change the configuration, as optimizer.lr=1e-4")
    ] = None,
    current_code: Annotated[
        bool, typer.Option("--current-code", help="Use the trainer on this machine, not the run's release")
    ] = False,
    wait: Annotated[
        Literal["none", "started", "step"], typer.Option("--wait", help="Return once this is reached")
    ] = "started",
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for --wait", min=0, callback=finite)
    ] = 120,
    json: JsonOption = False,
) -> None:
    """Start a new run from an ended run's newest checkpoint, with its code, configuration and environment."""
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_launch
        from dflash_ops.verbs import resume as verb

        options = verb.ResumeOptions(run, name, tuple(set_ or ()), current_code, wait, timeout)
        show(verb.resume(opened, options), json=json, render=show_launch)


environments = typer.Typer(help="Locked environments: list, build, who uses them.", no_args_is_help=True)
app.add_typer(environments, name="env")


@environments.command("list")
def env_list(container: ContainerOption = None, json: JsonOption = False) -> None:
    """List the environments of the inventory, and those that are built in the container."""
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_env_list
        from dflash_ops.verbs import env as verb

        show(verb.listing(opened), json=json, render=show_env_list)


@environments.command("build")
def env_build(
    name: Annotated[
        str | None,
        typer.Argument(help="Default: the only one", metavar="NAME", autocompletion=known("environments")),
    ] = None,
    container: ContainerOption = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Fetch the wheels here and send them: the container needs no network")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Build a locked environment in the container, beside those that are there."""
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_env_build
        from dflash_ops.verbs import env as verb

        built = verb.build(opened, name, offline=offline)
        show(built, json=json, render=show_env_build)


@environments.command("uses")
def env_uses(
    name: Annotated[str, typer.Argument(help="Name, or the beginning of its hash", metavar="NAME")],
    container: ContainerOption = None,
    json: JsonOption = False,
) -> None:
    """List the runs that were launched with an environment."""
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_env_uses
        from dflash_ops.verbs import env as verb

        used = verb.uses(verb.listing(opened), name)
        show(used, json=json, render=show_env_uses)


@app.command()
def init(
    host: Annotated[str, typer.Argument(help="A name that ssh knows, or user@address:port", metavar="HOST")],
    container: Annotated[
        list[str] | None, typer.Option("--container", "-c", help="Number or name; may be repeated", metavar="NUMBER")
    ] = None,
    python: Annotated[str | None, typer.Option("--python", help="The interpreter's path in the container")] = None,
    identity: Annotated[Path | None, typer.Option("--identity", help="Private key file for the host")] = None,
    jump: Annotated[list[str] | None, typer.Option("--jump", help="Host on the way; may be repeated")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take the host key that is shown, and what is unambiguous")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Look at a host's containers, write the chosen ones into inventory.yaml, and end with doctor.

    What stands in the file already stays as it is. Without a terminal, options decide.
    """
    from dflash_ops.show.choose import ByPerson, say
    from dflash_ops.show.tables import show_init
    from dflash_ops.verbs import init as verb

    Common.json = json
    Common.so_far = "no inventory was written"
    options = verb.InitOptions(host, tuple(container or ()), python, identity, tuple(jump or ()))
    by_person = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    ask = (ByPerson if by_person else verb.ByOptions)(_ask_about_key(yes))
    written = verb.init(Common.inventory, options, ask, say)
    Common.so_far = f"{written.path} is written; `dflash doctor {written.containers[0]}` looks at the container"
    answer = verb.diagnosed(written, say)
    show(answer, json=json, render=show_init)
    raise typer.Exit(verb.exit_code(answer))


def _ask_about_key(yes: bool) -> "Callable[[UnknownKey], bool]":
    """Shows an unknown host key and asks whether to write it down, unless `yes`."""

    def ask(key: "UnknownKey") -> bool:
        print(f"{key.host} shows the key {key.kind} {key.fingerprint}", file=sys.stderr)
        if not yes:
            confirm("Is that its fingerprint (on the host: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`)?")
        Common.so_far = f"the key of {key.host} is in {key.known_hosts}"
        return True

    return ask


@app.command()
def trust(
    host: Annotated[str, typer.Argument(help="Host of the inventory", metavar="HOST", autocompletion=known("hosts"))],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept the key without asking")] = False,
    json: JsonOption = False,
) -> None:
    """Show a host's key and write it to known_hosts once you agree. A changed key is refused.

    @cert-authority lines are honoured only for a host with `via: openssh`.
    """
    from dflash_ops.inventory.load import load_inventory
    from dflash_ops.show.answers import show_trust
    from dflash_ops.verbs import trust as verb

    Common.json = json

    show(verb.trust(load_inventory(Common.inventory), host, _ask_about_key(yes)), json=json, render=show_trust)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_(
    run: Annotated[
        str,
        typer.Argument(
            help="A run; its release, interpreter and variables are used", metavar="RUN", autocompletion=known_runs
        ),
    ],
    argv: Annotated[list[str], typer.Argument(help="Command and arguments, after `--`", metavar="COMMAND")],
    container: ContainerOption = None,
) -> None:
    """Run a command in the container as the trainer of a run does; its exit code is the command's."""
    with session(container) as opened:
        from dflash_ops.verbs.exec import execute

        raise CommandEnded(execute(opened, run, argv, sys.stdout.buffer, sys.stderr.buffer))


@app.command()
def gc(
    container: ContainerOption = None,
    keep: Annotated[int, typer.Option("--keep", min=0, help="Newest ended runs that stay")] = 10,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            min=0,
            callback=finite,
            help="Days that a run stays after its end, a compile cache after its last use",
        ),
    ] = 14,
    caches: Annotated[
        bool, typer.Option("--caches", help="Compile caches of any age; downloads too, when no run is live")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is listed, after asking")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    json: JsonOption = False,
) -> None:
    """List (or remove) old runs, caches, releases and environments that nothing uses.

    Lists only, unless --remove. Keeps what a live run uses.
    """
    with session(container, json=json) as opened:
        from dflash_ops.show.answers import show_gc
        from dflash_ops.verbs import gc as verb

        options = verb.GcOptions(keep, older_than, caches)
        found = verb.look(opened, options)
        if remove and found.items:
            if not yes:
                show_gc(found)
                confirm(f"Remove these from {opened.container_name}?")
            found = verb.remove(opened, options, found)
        show(found, json=json, render=show_gc)
