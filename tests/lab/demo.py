"""Shows the main job, command by command: a real drafter trained in the lab's container.

    python -m tests.lab.demo

Each command is shown before its output, as one would type it in the repository's folder. At the end the run's own
metrics must show that the loss fell over at least 20 optimizer steps.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.lab.lab import DEFAULT_STATE, REPOSITORY, Lab, LabError, why_not
from tests.lab.small_target import prepare

DFLASH = REPOSITORY / ".venv/bin/dflash"
PULLED = REPOSITORY / ".cache" / "demo"
STEPS = 24  # are watched; 20 at least must be in the metrics


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background: Ctrl-C could not be shown
        signal.signal(signal.SIGINT, signal.default_int_handler)
    reason = why_not()
    if reason:
        print(f"demo: {reason}", file=sys.stderr)
        return 1
    try:
        prepare()
        print("lab: raising sshd on 127.0.0.1 and container 200 with systemd", flush=True)
        Lab(DEFAULT_STATE).up()
        return show_the_main_job()
    except (LabError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def show_the_main_job() -> int:
    run = time.strftime("demo-%Y%m%d-%H%M%S")
    shutil.rmtree(PULLED, ignore_errors=True)  # of the demo before
    dflash("launch", "demo", "--run", run, "--wait", "step")
    dflash("status")
    watch_log(run)
    dflash("pull", run, "--what", "metrics", "--to", str(PULLED.relative_to(REPOSITORY)))
    dflash("kill", run, "-y")
    dflash("status", run)
    losses = read_losses(PULLED / run / "metrics.jsonl")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    fell = len(losses) >= 20 and last < first
    verdict = "fell" if fell else "did NOT fall"
    print(
        f"\ndemo: over {len(losses)} optimizer steps the loss {verdict}: first five {first:.2f}, last five {last:.2f}"
    )
    print("demo: the lab stays up for your own tries; `make lab-down` takes it away")
    return 0 if fell else 1


def announce(*words: str) -> list[str]:
    print(f"\n$ dflash {shlex.join(words)}", flush=True)
    return [str(DFLASH), *words]


def dflash(*words: str) -> None:
    subprocess.run(announce(*words), check=True, cwd=REPOSITORY, stdin=subprocess.DEVNULL)


def watch_log(run: str) -> None:
    """Follow the log until enough steps are done, then press Ctrl-C as a user would."""
    follower = subprocess.Popen(announce("tail-logs", run), cwd=REPOSITORY, text=True, stdout=subprocess.PIPE)
    assert follower.stdout is not None
    for line in follower.stdout:
        print(line, end="", flush=True)
        if f" step {STEPS}/" in line:
            break
    print("^C", flush=True)
    follower.send_signal(signal.SIGINT)
    for line in follower.stdout:
        print(line, end="", flush=True)
    follower.wait()


def read_losses(metrics: Path) -> list[float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


if __name__ == "__main__":
    sys.exit(main())
