"""Tries every fault at every moment of every verb for real in the lab, and writes the table.

    python -m tests.lab.chaos [--only TEXT] [--json FILE]

A cell is a fault, a verb (launch, follow, kill, pull) and a phase: before the verb, in the middle of it, after it.
When the verb has ended and the fault is taken back, the container itself is asked what is true, and `dflash status`
must agree. Promises that every cell must keep:

- no hang: the verb ends within its deadline;
- no twin: at most one process of the run, even when it is launched again;
- no false death: a live run is never called failed, lost, cancelled or succeeded;
- no lost reason: a dead run has the state that the fault gave it, and a reason;
- no riddle: a verb that fails has a documented exit code and says one sentence;
- no damage: what tail-logs showed is the log, byte for byte; what pull left under its final name is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tests.lab import faults
from tests.lab.lab import Lab, LabError, wait_for, why_not
from tests.lab.user import Dflash, clean, make_user

VERBS = ("launch", "follow", "kill", "pull")
PHASES = ("before", "middle", "after")
DEADLINE = 150.0  # seconds in which every verb must end; the longest of its own deadlines is 60
DOCUMENTED = {69, 75, 77, 78, 100}
ALIVE = {"starting", "running", "busy-quiet", "stalled", "stopping"}
OVER = {"succeeded", "failed", "cancelled", "lost"}
STEPS, PAUSE = 60, 0.15  # a run of about ten seconds


@dataclass
class Trial:
    """A cell while it is tried."""

    lab: Lab
    dflash: Dflash
    run: str
    verb: str
    phase: str
    process: subprocess.Popen[str] | None = None

    @property
    def unit(self) -> str:
        return f"dflash-{self.run}.service"

    @property
    def folder(self) -> str:
        return f"{self.dflash.root}/runs/{self.run}"


@dataclass
class Outcome:
    """What a cell came to. `broken` names promises that were not kept."""

    fault: str
    verb: str
    phase: str
    exit_code: int | None = None
    seconds: float = 0.0
    alive: bool = False
    state: str = ""
    reason: str = ""
    said: str = ""  # the verb's own sentence
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """`inject` is a context: entered to do it, left to take it back. `ends_as` are the states of a run that it ends."""

    inject: Callable[[Trial], AbstractContextManager[None]]
    verbs: tuple[str, ...] = VERBS
    phases: tuple[str, ...] = PHASES
    ends_as: frozenset[str] = frozenset()
    lasts: float = 5.0  # seconds in the middle of a verb, unless the verb ends first


# ---- the faults -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def client_killed(trial: Trial) -> Iterator[None]:
    assert trial.process is not None
    trial.process.kill()
    yield


@contextlib.contextmanager
def client_interrupted(trial: Trial) -> Iterator[None]:
    assert trial.process is not None
    trial.process.terminate()
    yield


@contextlib.contextmanager
def sshd_killed(trial: Trial) -> Iterator[None]:
    trial.lab.stop_sshd(sessions=True)
    try:
        yield
    finally:
        trial.lab.start_sshd()


@contextlib.contextmanager
def peer_vanished(trial: Trial) -> Iterator[None]:
    with trial.lab.far_away.unplugged():
        yield


@contextlib.contextmanager
def container_stopped(trial: Trial) -> Iterator[None]:
    trial.lab.stop_container()
    try:
        yield
    finally:
        trial.lab.start_container()


@contextlib.contextmanager
def container_restarted(trial: Trial) -> Iterator[None]:
    trial.lab.restart_container()
    yield


def container_frozen(trial: Trial) -> AbstractContextManager[None]:
    return faults.frozen(trial.lab)


def pct_hangs(trial: Trial) -> AbstractContextManager[None]:
    return trial.lab.slow_pct(3600)


def container_locked(trial: Trial) -> AbstractContextManager[None]:
    return faults.locked(trial.lab)


@contextlib.contextmanager
def disk_full(trial: Trial) -> Iterator[None]:
    faults.fill(trial.lab, trial.dflash.root)
    try:
        yield
    finally:
        trial.lab.container("rm", "-f", f"{trial.dflash.root}/filler")


@contextlib.contextmanager
def log_deleted(trial: Trial) -> Iterator[None]:
    trial.lab.container("rm", "-f", f"{trial.folder}/log")
    yield


@contextlib.contextmanager
def unit_killed(trial: Trial) -> Iterator[None]:
    trial.lab.container("systemctl", "kill", "-s", "KILL", trial.unit, check=False)
    yield


@contextlib.contextmanager
def recorder_fails(trial: Trial) -> Iterator[None]:
    trial.lab.container("sh", "-c", f"printf '#!/bin/sh\\nexit 1\\n' >{trial.folder}/on-exit", check=False)
    yield


def clock_jumped(hours: int) -> Callable[[Trial], AbstractContextManager[None]]:
    """The container's clock is the machine's, so its past is moved instead: every file of the run is that much older
    or newer than the clock says."""

    @contextlib.contextmanager
    def inject(trial: Trial) -> Iterator[None]:
        shift = f"find {trial.folder} -type f -exec touch -d '{-hours} hours' {{}} +"
        trial.lab.container("sh", "-c", shift, check=False)
        yield

    return inject


@contextlib.contextmanager
def unit_name_taken(trial: Trial) -> Iterator[None]:
    trial.lab.container("systemd-run", "--quiet", f"--unit={trial.unit}", "sleep", "3600")
    try:
        yield
    finally:
        trial.lab.container("systemctl", "kill", "-s", "KILL", trial.unit, check=False)
        wait_for("the other unit has ended", lambda: not unit_active(trial))
        trial.lab.container("systemctl", "reset-failed", trial.unit, check=False)


GONE = frozenset({"lost"})
FAULTS: dict[str, Fault] = {
    "client SIGKILLed": Fault(client_killed, phases=("middle",)),
    "client SIGTERMed": Fault(client_interrupted, phases=("middle",)),
    "sshd killed": Fault(sshd_killed),
    "peer vanished": Fault(peer_vanished, lasts=75),
    "pct hangs": Fault(pct_hangs, phases=("before", "after")),
    "container stopped": Fault(container_stopped, ends_as=GONE),
    "container restarted": Fault(container_restarted, ends_as=GONE),
    "container frozen": Fault(container_frozen),
    "container locked": Fault(container_locked),
    "disk full": Fault(disk_full, ends_as=frozenset({"failed"})),
    "log deleted": Fault(log_deleted, verbs=("follow", "kill", "pull")),
    "unit SIGKILLed": Fault(unit_killed, ends_as=frozenset({"failed"})),
    "recorder fails": Fault(recorder_fails, verbs=("follow", "kill"), phases=("before", "middle")),
    "clock an hour on": Fault(clock_jumped(1)),
    "clock an hour back": Fault(clock_jumped(-1)),
    "unit name taken": Fault(unit_name_taken, verbs=("launch",), phases=("before",)),
}
NO_RUN_YET = ("log deleted", "unit SIGKILLed", "recorder fails", "clock an hour on", "clock an hour back")


def cells() -> list[tuple[str, str, str]]:
    return [
        (name, verb, phase)
        for name, fault in FAULTS.items()
        for verb in fault.verbs
        for phase in fault.phases
        if not (verb == "launch" and phase == "before" and name in NO_RUN_YET)
    ]


# ---- a cell -----------------------------------------------------------------------------------------------------


def try_cell(lab: Lab, name: str, verb: str, phase: str) -> Outcome:
    """Inject one fault at one moment and hold the outcome to the promises."""
    fault = FAULTS[name]
    outcome = Outcome(name, verb, phase)
    with tempfile.TemporaryDirectory(prefix="dflash-chaos-") as folder:
        dflash = make_user(lab, Path(folder))
        trial = Trial(lab, dflash, "trial", verb, phase)
        disk = faults.small_disk(lab, dflash.root, 160) if name == "disk full" else contextlib.nullcontext()
        if name == "peer vanished":
            dflash.far_away(lab.far_away)
        try:
            with disk:
                begin(trial)
                started = time.monotonic()
                perform(trial, fault, outcome)
                outcome.seconds = round(time.monotonic() - started, 1)
                examine(trial, fault, outcome)
        except (LabError, AssertionError, ValueError, subprocess.SubprocessError) as error:
            outcome.broken.append(f"the trial itself failed: {error}")
        finally:
            if trial.process is not None and trial.process.poll() is None:
                trial.process.kill()
            clean(lab, dflash.root)
    return outcome


def begin(trial: Trial) -> None:
    """What stands before the verb: for all but launch, a run that has begun."""
    endless = trial.verb in ("kill", "pull", "launch")
    config: dict[str, Any] = {"steps": None if endless else STEPS, "pause": PAUSE, "save_every": 5}
    if trial.verb == "kill":
        config["slow_stop"] = 2
    if trial.verb == "launch":
        config["slow_start"] = 2
    if trial.verb == "pull":
        config["checkpoint_bytes"] = 24 << 20
    trial.dflash.job(config=config, timeout=60)
    if trial.verb != "launch":
        trial.dflash("launch", "job", "--run", trial.run, "--wait", "step")
    if trial.verb == "pull":
        wait_for("there is a checkpoint", lambda: checkpoints(trial), 60)


def words(trial: Trial) -> list[str]:
    return {
        "launch": ["launch", "job", "--run", trial.run, "--wait", "step"],
        "follow": ["tail-logs", trial.run, "-n", "100000"],
        "kill": ["kill", trial.run, "-y"],
        "pull": ["pull", trial.run, "--what", "checkpoints", "--to", str(trial.dflash.folder / "pulled")],
    }[trial.verb]


def perform(trial: Trial, fault: Fault, outcome: Outcome) -> None:
    if trial.phase == "before":
        with fault.inject(trial):
            finish(trial, start(trial), DEADLINE, outcome)
    elif trial.phase == "middle":
        reader = start(trial)
        wait_for("the verb is under way", lambda: under_way(trial) or ended(trial), 60)
        with fault.inject(trial):
            lasting = time.monotonic() + fault.lasts
            while time.monotonic() < lasting and not ended(trial):
                time.sleep(0.1)
        finish(trial, reader, DEADLINE, outcome)
    else:
        finish(trial, start(trial), DEADLINE, outcome)
        with fault.inject(trial):
            time.sleep(0.3)


def start(trial: Trial) -> threading.Thread:
    """The verb as a process, and a thread that reads all it says."""
    trial.process = trial.dflash.start(*words(trial))

    def read() -> None:
        assert trial.process is not None
        trial.dflash.said = trial.process.communicate()

    trial.dflash.said = ("", "")
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader


def ended(trial: Trial) -> bool:
    return trial.process is not None and trial.process.poll() is not None


def finish(trial: Trial, reader: threading.Thread, seconds: float, outcome: Outcome) -> None:
    assert trial.process is not None
    reader.join(seconds)
    if reader.is_alive():
        outcome.broken.append(f"no hang: the verb did not end within {seconds:.0f} s")
        trial.process.kill()
        reader.join()
    outcome.exit_code = trial.process.returncode


def under_way(trial: Trial) -> bool:
    """Whether the verb is in its middle, as the container sees it."""
    if trial.verb == "launch":
        return unit_active(trial)
    if trial.verb == "kill":
        return exists(trial, f"{trial.folder}/kill-requested.json")
    if trial.verb == "pull":
        return any((trial.dflash.folder / "pulled").rglob("*.partial*"))
    # Programs that came by stdin run outside every unit.
    return trial.lab.container("pgrep", "-f", "^[^ ]*python3 .*-c ", check=False).returncode == 0


def exists(trial: Trial, path: str) -> bool:
    return trial.lab.container("test", "-e", path, check=False).returncode == 0


def checkpoints(trial: Trial) -> list[str]:
    listing = trial.lab.container("sh", "-c", f"ls {trial.folder}/checkpoints 2>/dev/null || true").stdout.split()
    return [name for name in listing if not name.endswith(".tmp")]


def unit_active(trial: Trial) -> bool:
    shown = trial.lab.container("systemctl", "show", "-p", "SubState", trial.unit, check=False).stdout
    return shown.strip() in ("SubState=running", "SubState=stop-sigterm")


def processes(trial: Trial) -> int:
    """How many processes of the run there are in the container."""
    pattern = f"-m trainer run {trial.folder}/"
    return int(trial.lab.container("pgrep", "-c", "-f", "--", pattern, check=False).stdout.strip() or 0)


# ---- the promises -----------------------------------------------------------------------------------------------


def examine(trial: Trial, fault: Fault, outcome: Outcome) -> None:
    """Ask the container what is true, and dflash what it says."""
    if not exists(trial, trial.folder):
        outcome.state = "no run"
        if trial.verb != "launch" or outcome.exit_code == 0:
            outcome.broken.append("no lost reason: the run's directory is gone")
    else:
        settle(trial)
        status = trial.dflash.json("status", trial.run, code=None)
        outcome.alive = processes(trial) > 0
        outcome.state = status.get("state", f"error {status.get('error', {}).get('code')}")
        outcome.reason = status.get("reason") or status.get("error", {}).get("message", "")
        check_state(trial, fault, outcome)
    sentences = [line for line in trial.dflash.said[1].splitlines() if line.startswith("dflash: ")]
    outcome.said = sentences[-1] if sentences else ""
    killed = trial.phase == "middle" and outcome.fault.startswith("client ")
    if outcome.exit_code != 0 and not killed and (outcome.exit_code not in DOCUMENTED or not sentences):
        outcome.broken.append(f"no riddle: exit {outcome.exit_code}, {outcome.said or 'without a sentence'}")
    if trial.verb == "launch":
        trial.dflash(*words(trial), code=None, timeout=DEADLINE)
    if processes(trial) > 1:
        outcome.broken.append(f"no twin: {processes(trial)} processes of one run")
    if trial.verb == "follow":
        check_followed(trial, outcome)
    if trial.verb == "pull":
        check_pulled(trial, outcome)


def settle(trial: Trial) -> None:
    """A unit that is on its way out may take until its SIGKILL."""
    with contextlib.suppress(LabError):
        wait_for(
            "the unit is neither starting nor stopping",
            lambda: not trial.lab.container(
                "systemctl", "is-active", trial.unit, check=False
            ).stdout.startswith(("activating", "deactivating")),
            60,
        )  # fmt: skip


def check_state(trial: Trial, fault: Fault, outcome: Outcome) -> None:
    if outcome.alive:
        if outcome.state not in ALIVE | {"unknown"}:
            outcome.broken.append(f"no false death: a live run is called {outcome.state}")
        return
    expected = set(fault.ends_as)
    if trial.verb == "kill":
        expected.add("cancelled")
    if trial.verb == "follow":
        expected.add("succeeded")  # it did its steps before the fault came, or in spite of it
    if outcome.state not in (expected & OVER):
        outcome.broken.append(
            f"no lost reason: a dead run is called {outcome.state}, not {' or '.join(sorted(expected))}"
        )
    elif not outcome.reason:
        outcome.broken.append("no lost reason: it has none")


def check_followed(trial: Trial, outcome: Outcome) -> None:
    """What was shown is the log's beginning, or all of it when the follower saw the end."""
    shown = trial.dflash.said[0]
    if outcome.fault == "log deleted":
        return  # what is there now is another file: systemd makes it for the recorder
    log = trial.lab.container("cat", f"{trial.folder}/log").stdout
    whole = outcome.exit_code == 0 and trial.phase != "before"
    if not (log == shown if whole else log.startswith(shown)):
        outcome.broken.append("no damage: what tail-logs showed is not the log")


def check_pulled(trial: Trial, outcome: Outcome) -> None:
    pulled = trial.dflash.folder / "pulled" / trial.run / "checkpoints"
    whole = [path for path in pulled.glob("step-*") if not path.name.endswith(".partial")]
    for path in whole:
        there = trial.lab.container("sha256sum", f"{trial.folder}/checkpoints/{path.name}/weights.bin", check=False)
        if there.returncode == 0:  # else the trainer has deleted it meanwhile
            digest = hashlib.sha256((path / "weights.bin").read_bytes()).hexdigest()
            if digest != there.stdout.split()[0]:
                outcome.broken.append(f"no damage: {path.name} is not what the container has")
    if outcome.exit_code == 0 and not whole:
        outcome.broken.append("no damage: pull succeeded and brought nothing")


# ---- the table --------------------------------------------------------------------------------------------------


def run_all(chosen: list[tuple[str, str, str]], labs: list[Lab], told: Callable[[Outcome], None]) -> list[Outcome]:
    """Every chosen cell, shared among the labs."""
    waiting: Queue[tuple[str, str, str]] = Queue()
    for cell in chosen:
        waiting.put(cell)
    outcomes: list[Outcome] = []

    def work(lab: Lab) -> None:
        while True:
            try:
                cell = waiting.get_nowait()
            except Empty:
                return
            outcome = try_cell(lab, *cell)
            outcomes.append(outcome)
            told(outcome)

    threads = [threading.Thread(target=work, args=(lab,)) for lab in labs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(outcomes, key=lambda outcome: chosen.index((outcome.fault, outcome.verb, outcome.phase)))


def line(outcome: Outcome) -> str:
    what = "kept" if not outcome.broken else "BROKEN " + "; ".join(outcome.broken)
    life = "alive" if outcome.alive else "ended" if outcome.state != "no run" else "-"
    return (
        f"{outcome.fault:20} {outcome.verb:7} {outcome.phase:7} exit {outcome.exit_code!s:5} {outcome.seconds:6.1f} s"
        f"  {life:6} {outcome.state:10} {what}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="cells whose fault, verb and phase hold this text")
    parser.add_argument("--json", type=Path, default=Path("chaos.json"), help="where the table goes (%(default)s)")
    parser.add_argument("--labs", type=int, default=2, help="labs side by side (%(default)s)")
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"chaos: {reason}", file=sys.stderr)
        return 1
    chosen = [cell for cell in cells() if options.only in " ".join(cell)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-chaos-labs-")))
        labs = [Lab(folder / str(number) / "state", tethered=True) for number in range(min(options.labs, len(chosen)))]
        for lab in labs:
            stack.callback(lab.down)
            lab.up()
        outcomes = run_all(chosen, labs, lambda outcome: print(line(outcome), flush=True))
    print(f"\n{'fault':20} {'verb':7} {'phase':7}")
    for outcome in outcomes:
        print(line(outcome))
    states = Counter("alive" if outcome.alive else outcome.state for outcome in outcomes)
    broken = [outcome for outcome in outcomes if outcome.broken]
    print(f"\n{len(outcomes)} cells: {dict(states)}; promises broken in {len(broken)}")
    document = {"schema": 1, "cells": [asdict(outcome) for outcome in outcomes], "broken": len(broken)}
    options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print(f"written to {options.json}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
