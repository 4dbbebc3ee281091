"""What can be typed: options in, a rendered answer out. No logic here, and nothing heavy imported at the top.

Annotations are evaluated here, not kept as text: Typer would compile those of every command each time.
"""

import os
import sys
from collections.abc import Callable
from gc import freeze, set_threshold
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dflash_ops.errors import DflashError, Exit, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dflash_ops.session import Session
    from dflash_ops.transport.known_hosts import UnknownKey


class Verbs(TyperGroup):
    """All verbs; click makes of a reader that has enough, and of Ctrl-C, what no exit code of ours says."""

    def invoke(self, ctx: Any) -> Any:
        """See click."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _no_reader()
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


# Typer has click's exceptions under another name in each of its versions.
CLICK_USAGE: Any = typer.BadParameter.__base__


class Common:
    """Options of the whole command line; they may stand before the verb."""

    debug = False
    inventory: Path | None = None
    json = False  # set by a verb's --json, so that errors are JSON as well
    session: "Session | None" = None  # the verb's, which knows what Ctrl-C leaves behind
    so_far = "nothing was changed"  # by a verb without one


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


def _known(what: Literal["targets", "jobs", "hosts", "environments"]) -> Callable[[str], list[str]]:
    """Completes names of the inventory. Completion never fails and never connects."""

    def complete(incomplete: str) -> list[str]:
        from dflash_ops.inventory import load_inventory

        try:
            names = getattr(load_inventory(Common.inventory), what)
        except DflashError:
            return []
        return [name for name in names if name.startswith(incomplete)]

    return complete


def _known_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Completes runs of the target that this machine has seen."""
    from dflash_ops.inventory import load_inventory
    from dflash_ops.seen import names

    try:
        inventory = load_inventory(Common.inventory)
        target, _ = inventory.target(context.params.get("target"))
    except DflashError:
        return []
    return [name for name in names(inventory.path, target) if name.startswith(incomplete)]


def _finite(value: float | None) -> float | None:
    """Refuses `nan` and `inf`, which click takes for numbers: nothing would ever end."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter("it must be a finite number")
    return value


TargetOption = Annotated[
    str | None,
    typer.Option("--target", "-t", help="Default: the inventory's", metavar="NAME", autocompletion=_known("targets")),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there")]


def session(target: str | None, *, json: bool = False) -> "Session":
    """The session of a verb, from the inventory that the options name."""
    from dflash_ops.inventory import load_inventory
    from dflash_ops.session import open_session

    Common.json = json
    Common.session = open_session(load_inventory(Common.inventory), target)
    return Common.session


def show(model: "BaseModel", *, json: bool, render: Callable[[Any], None]) -> None:
    """Print an answer: the model as JSON, or as `render` shows it."""
    if json:
        print(model.model_dump_json(indent=2))
    else:
        render(model)


RunArgument = Annotated[
    str | None,
    typer.Argument(help="Default: the newest run of the target", metavar="RUN", autocompletion=_known_runs),
]


@app.command()
def launch(
    job: Annotated[
        str | None,
        typer.Argument(help="Default: the inventory's default job", metavar="JOB", autocompletion=_known("jobs")),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: job and time")] = None,
    target: TargetOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Of the trainer's configuration, as optimizer.lr=1e-4")
    ] = None,
    wait: Annotated[
        Literal["none", "started", "step"] | None,
        typer.Option("--wait", help="What must be true before it returns; default: the job's `wait`, else started"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="Seconds to wait for that; default: the job's `timeout`, else 120",
            min=0,
            callback=_finite,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; nothing is connected")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Stop the run that holds the same GPUs first")] = False,
    json: JsonOption = False,
) -> None:
    """Start a run; return when it is true that it runs."""
    with session(target, json=json) as opened:
        from dflash_ops import launch as verb

        options = verb.LaunchOptions(job, run, tuple(set_ or ()), wait, timeout, replace)
        asked = verb.plan(opened.inventory, opened.target_name, opened.paths, options)
        if dry_run:
            if json:
                from json import dumps

                print(dumps({"schema": 1, "spec": asked.spec, "argv": asked.argv}, indent=2))
            else:
                verb.render_plan(asked)
            return
        show(verb.execute(opened, asked, replace), json=json, render=verb.render)


@app.command()
def kill(
    run: RunArgument = None,
    target: TargetOption = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds from SIGTERM to SIGKILL", min=0, callback=_finite)
    ] = 45,
    force: Annotated[bool, typer.Option("--force", help="SIGKILL at once: no checkpoint is written")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    json: JsonOption = False,
) -> None:
    """End a run: it may save first. Returns when it is gone."""
    with session(target, json=json) as opened:
        from dflash_ops import kill as verb
        from dflash_ops.status import look

        if not yes:
            found = look(opened, run)
            run = found.run  # the newest is chosen once
            if not found.verdict.finished:
                confirm(verb.question(found))
        show(verb.kill(opened, verb.KillOptions(run, grace, force)), json=json, render=verb.render)


@app.command()
def status(
    run: RunArgument = None,
    target: TargetOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking, over one connection")] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit as the run stands: 0 succeeded, 100 failed, 101 not finished, 103 cancelled, 104 lost",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """How a run is: its unit, log and GPUs, each asked for itself, and what follows from them."""
    if watch and json:
        raise UsageError("--watch draws a live view, --json prints one document", "use one of the two")
    with session(target, json=json) as opened:
        from dflash_ops import status as verb

        def render() -> ModuleType:  # Rich, too, is imported while the container answers
            from dflash_ops import render

            return render

        if watch:
            answer = render().show_watch(verb.watch(opened, run))
        else:
            answer = verb.status(opened, run, None if json else render)
            show(answer, json=json, render=lambda status: render().show_status(status))
        if exit_code:
            raise typer.Exit(answer.exit_code)


@app.command("tail-logs")
def tail_logs(
    run: RunArgument = None,
    target: TargetOption = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Last lines (with --grep: last matches) to begin with")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Go on until the run ends")] = True,
    since: Annotated[str | None, typer.Option("--since", help="10m, 2h, 1d, or 2026-11-30T07:20:00Z")] = None,
    grep: Annotated[str | None, typer.Option("--grep", help="Only lines that match this regular expression")] = None,
) -> None:
    """What a run says. Reconnects by itself; Ctrl-C stops looking, not the run."""
    from dflash_ops import logs as verb

    begin = verb.parse_since(since) if since is not None else None
    pattern = verb.parse_grep(grep) if grep is not None else None
    if lines is None and begin is None and pattern is None:
        lines = 50
    with session(target) as opened:
        from dflash_ops import render

        try:
            ended = verb.tail(opened, verb.TailOptions(run, lines, follow, begin, pattern), sys.stdout)
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.flush()
            opened.say(f"\ndetached: the run is not affected; `dflash tail-logs{f' {run}' if run else ''}` looks again")
            return
        if follow:
            opened.say(f"-- {render.verdict_line(ended)}")


@app.command()
def runs(
    target: TargetOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Newest runs to show")] = 20,
    json: JsonOption = False,
) -> None:
    """The runs of a target, newest first, each with its verdict."""
    with session(target, json=json) as opened:
        from dflash_ops import render
        from dflash_ops import runs as verb

        show(verb.runs(opened, count), json=json, render=render.show_runs)


@app.command()
def wait(
    run: RunArgument = None,
    target: TargetOption = None,
    goal: Annotated[
        Literal["started", "step", "finished"], typer.Option("--for", help="What is waited for")
    ] = "finished",
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds; default: for ever", min=0, callback=_finite)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Wait for a run; exits 0 when it came so far, else as it stands: 100 failed, 101 not finished, 103, 104."""
    with session(target, json=json) as opened:
        from dflash_ops import render
        from dflash_ops import wait as verb

        answer = verb.wait(opened, verb.WaitOptions(run, goal, timeout))
        show(answer, json=json, render=render.show_waited)
        raise typer.Exit(answer.exit_code)


@app.command()
def checkpoint(
    run: RunArgument = None,
    target: TargetOption = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for it", min=1, callback=_finite)] = 600,
    json: JsonOption = False,
) -> None:
    """Ask a running trainer to save now; return when the checkpoint is whole."""
    with session(target, json=json) as opened:
        from dflash_ops import checkpoint as verb
        from dflash_ops import render

        show(verb.checkpoint(opened, run, timeout), json=json, render=render.show_saved)


@app.command()
def pull(
    run: Annotated[str, typer.Argument(help="The run", metavar="RUN", autocompletion=_known_runs)],
    target: TargetOption = None,
    what: Annotated[
        Literal["checkpoints", "metrics", "log", "all"],
        typer.Option("--what", help="checkpoints, metrics, log or all", metavar="FILES"),
    ] = "checkpoints",
    to: Annotated[Path, typer.Option("--to", help="They come to this folder, below the run's name")] = Path(),
    json: JsonOption = False,
) -> None:
    """Bring what a run made here: resumed where it broke off, verified by hash, in place only when whole."""
    with session(target, json=json) as opened:
        from dflash_ops import pull as verb
        from dflash_ops import render

        with render.pull_progress() as progress:
            answer = verb.pull(opened, verb.PullOptions(run, what, to), progress)
        show(answer, json=json, render=render.show_pulled)


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(help="Default: the inventory's", metavar="TARGET")] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", "-e", help="Default: the default job's, or the only one")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look at everything between here and the GPUs; each line says what is, and the cure. Exits 78 if one fails."""
    with session(target, json=json) as opened:
        from dflash_ops import doctor as verb
        from dflash_ops import render

        answer = verb.doctor(opened, environment)
        show(answer, json=json, render=render.show_diagnosis)
        raise typer.Exit(answer.exit_code)


@app.command()
def diff(
    run_a: Annotated[str, typer.Argument(help="A run", metavar="RUN_A", autocompletion=_known_runs)],
    run_b: Annotated[str, typer.Argument(help="Another", metavar="RUN_B", autocompletion=_known_runs)],
    target: TargetOption = None,
    json: JsonOption = False,
) -> None:
    """What differs between two runs: packages, driver, GPUs, code, configuration, data, cache, environment."""
    with session(target, json=json) as opened:
        from dflash_ops import diff as verb
        from dflash_ops import render

        show(verb.diff(opened, run_a, run_b), json=json, render=render.show_comparison)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The run that ended", metavar="RUN", autocompletion=_known_runs)],
    name: Annotated[str | None, typer.Option("--run", help="Name of the new run; default: job and time")] = None,
    target: TargetOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change the configuration, as optimizer.lr=1e-4")
    ] = None,
    current_code: Annotated[
        bool, typer.Option("--current-code", help="The trainer as it is here now, not as the run had it")
    ] = False,
    wait: Annotated[
        Literal["none", "started", "step"], typer.Option("--wait", help="What must be true before it returns")
    ] = "started",
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for that", min=0, callback=_finite)
    ] = 120,
    json: JsonOption = False,
) -> None:
    """Go on from a run's newest checkpoint, in a new run with the same code, configuration and environment."""
    with session(target, json=json) as opened:
        from dflash_ops import launch as shown
        from dflash_ops import resume as verb

        options = verb.ResumeOptions(run, name, tuple(set_ or ()), current_code, wait, timeout)
        show(verb.resume(opened, options), json=json, render=shown.render)


environments = typer.Typer(help="Locked environments: list, build, who uses them.", no_args_is_help=True)
app.add_typer(environments, name="env")


@environments.command("list")
def env_list(target: TargetOption = None, json: JsonOption = False) -> None:
    """The environments of the inventory, and what is built in the container."""
    with session(target, json=json) as opened:
        from dflash_ops import environment as verb

        show(verb.listing(opened), json=json, render=verb.render)


@environments.command("build")
def env_build(
    name: Annotated[
        str | None,
        typer.Argument(help="Default: the only one", metavar="NAME", autocompletion=_known("environments")),
    ] = None,
    target: TargetOption = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Fetch the wheels here and send them: the container needs no network")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Build a locked environment in the container, beside those that are there."""
    with session(target, json=json) as opened:
        from dflash_ops import environment as verb

        built = verb.build(opened, name, offline=offline)
        show(built, json=json, render=lambda report: print(f"{report.environment}: {report.state}, {report.path}"))


@environments.command("uses")
def env_uses(
    name: Annotated[str, typer.Argument(help="Name, or the beginning of its hash", metavar="NAME")],
    target: TargetOption = None,
    json: JsonOption = False,
) -> None:
    """The runs that were launched with an environment."""
    with session(target, json=json) as opened:
        from dflash_ops import environment as verb

        used = verb.uses(verb.listing(opened), name)
        show(used, json=json, render=lambda report: print("\n".join(report.runs) or "no run"))


@app.command()
def trust(
    host: Annotated[str, typer.Argument(help="Host of the inventory", metavar="HOST", autocompletion=_known("hosts"))],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: take what is shown")] = False,
    json: JsonOption = False,
) -> None:
    """Show a host's key and write it to known_hosts when you say so. A changed key is never taken.

    @cert-authority lines are honoured only for a host with `via: openssh`.
    """
    from dflash_ops import trust as verb
    from dflash_ops.inventory import load_inventory

    Common.json = json

    def ask(key: "UnknownKey") -> bool:
        print(f"{key.host} shows the key {key.kind} {key.fingerprint}", file=sys.stderr)
        if not yes:
            confirm("Is that its fingerprint (on the host: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`)?")
        Common.so_far = f"the key of {key.host} is in {key.known_hosts}"
        return True

    show(verb.trust(load_inventory(Common.inventory), host, ask), json=json, render=verb.render)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_(
    run: Annotated[
        str,
        typer.Argument(
            help="A run; its release, interpreter and variables are used", metavar="RUN", autocompletion=_known_runs
        ),
    ],
    argv: Annotated[list[str], typer.Argument(help="Command and arguments, after `--`", metavar="COMMAND")],
    target: TargetOption = None,
) -> None:
    """Run a command in the container as the trainer of a run does; its exit code is the command's."""
    with session(target) as opened:
        from dflash_ops.exec import execute

        raise CommandEnded(execute(opened, run, argv, sys.stdout.buffer, sys.stderr.buffer))


@app.command()
def gc(
    target: TargetOption = None,
    keep: Annotated[int, typer.Option("--keep", min=0, help="Newest ended runs that stay")] = 10,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            min=0,
            callback=_finite,
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
    """What may go from the container: old runs and compile caches, releases and environments that no run uses.

    Lists, unless --remove. What a live run uses stays.
    """
    with session(target, json=json) as opened:
        from dflash_ops import gc as verb

        options = verb.GcOptions(keep, older_than, caches)
        found = verb.look(opened, options)
        if remove and found.items:
            if not yes:
                verb.render(found)
                confirm(f"Remove these from {opened.target_name}?")
            found = verb.remove(opened, options, found)
        show(found, json=json, render=verb.render)


def confirm(question: str) -> None:
    """Ask on the terminal. Raises UsageError without one, Exit when the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"there is no terminal to ask on: {question}", "add -y to mean it")
    if not typer.confirm(question, err=True):
        print("nothing was done", file=sys.stderr)
        raise typer.Exit(Exit.OK)


def _failed(error: DflashError) -> int:
    """Say it; its exit code."""
    try:
        _say(error)
    except BrokenPipeError:
        _no_reader()
    return error.code


def _misread(error: Any) -> UsageError:
    """What click says of a command line, with the cure."""
    words = error.format_message().replace("Value error, ", "")  # pydantic's words, by which Typer checks values
    help_ = f"`{error.ctx.command_path} --help` shows what it takes" if error.ctx is not None else "see `dflash --help`"
    if words.startswith("Got unexpected extra argument") and "=" in words:
        help_ = f"give --set before each: `{error.ctx.command_path} --set a=1 --set b=2`"
    Common.json = "--json" in sys.argv
    return UsageError(words[:1].lower() + words[1:].rstrip("."), help_)


def _say(error: DflashError) -> None:
    from dflash_ops.text import visible

    if Common.json:
        import json

        body = {"code": error.code, "message": error.message, "hint": error.hint, "lines": error.lines}
        print(json.dumps({"schema": 1, "error": body}))
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    for line in error.lines:
        print(f"  | {visible(line)}", file=sys.stderr)
    print(f"{red}dflash: {visible(error.message)}{plain}", file=sys.stderr)
    if error.hint:
        print(f"  {visible(error.hint)}", file=sys.stderr)
    if Common.debug:
        import traceback

        # The exceptions hold what the container said: their text, too, is made safe.
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(visible(line), file=sys.stderr)
        for line in error.detail.splitlines():
            print(f"  | {visible(line)}", file=sys.stderr)


def _mend_streams() -> None:
    """Standard streams that were closed lead nowhere; what a stream cannot encode is spelled out."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _no_reader() -> None:
    """`dflash … | head`: the reader has enough. Python would complain when it flushes once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point: the one place where errors end."""
    # A command lives for a second. As Python comes, it would search all that was imported for garbage several times
    # meanwhile, 25 ms each, and for 100 ms more at its end.
    set_threshold(100_000)
    _mend_streams()
    try:
        code = _run()
    finally:
        freeze()
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the exit code stays what it is
            _no_reader()
    sys.exit(code)


def _run() -> int:
    """The exit code: one of `Exit` on every path, or that of the command that `exec` ran."""
    try:
        return Exit(app(prog_name="dflash", standalone_mode=False) or Exit.OK)
    except CommandEnded as ended:
        return ended.status
    except SystemExit as ended:  # shell completion, which exits by itself
        return Exit.OK if not ended.code else Exit.USAGE
    except DflashError as error:
        return _failed(error)
    except CLICK_USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), end="")  # the help, unless Typer has shown it already
            return Exit.USAGE
        return _failed(_misread(error))
    except Exception as error:
        message = f"a fault in dflash itself: {type(error).__name__}: {error}"
        return _failed(DflashError(Exit.INTERNAL, message, "--debug shows where"))


if __name__ == "__main__":
    main()
