"""Measures what `dflash` adds to reaching the container, how fast bytes come, and the round trips of a launch.

    make lab-packages && .venv/bin/python benchmarks/cli.py --rounds 15 --json cli.json      (as root)

Raises a lab of its own whose `pct` takes 0.8 s to start, as Perl does on a real node, and starts one run of the
stand-in trainer. The commands then take turns, so that a noisy machine touches all of them alike; every ratio is taken
round by round against `ssh HOST pct exec 200 -- true`, and the table gives medians. Most of the reference is `pct`
sleeping, most of `dflash` is computing: on a busy machine (see the load average) the ratios tell of the machine. Then,
with `pct` as quick as it is, a log and a checkpoint come whole, each against `cat` of the same file by OpenSSH.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.lab.lab import Lab, why_not
from tests.lab.user import Dflash, clean, inventory_for

PCT_SECONDS = 0.8
ROOT = "/var/lib/dflash-bench"
MEGABYTES = 200  # of log, and of checkpoint
BIG = f"{ROOT}/runs/big"
CHECKPOINT = f"{BIG}/checkpoints/step-00000001"
FILL = f"""
import os, random
os.makedirs("{CHECKPOINT}")
with open("{CHECKPOINT}/weights", "wb") as stream:
    for _ in range({MEGABYTES}):
        stream.write(os.urandom(1_000_000))
with open("{CHECKPOINT}/manifest.json", "w") as stream:
    stream.write("{{}}")
with open("{BIG}/log", "w") as stream:
    size = step = 0
    while size < {MEGABYTES}_000_000:
        step += 1
        moment = "2026-11-30T09:%02d:%02d.%03dZ" % (step // 60 % 60, step % 60, random.randrange(1000))
        numbers = step, random.uniform(0, 9), random.uniform(1, 5), random.randrange(1000)
        size += stream.write(moment + " INFO main step %d/999999 loss %.3f accept %.2f %d tok/s\\n" % numbers)
"""


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command that must succeed; CPU is that of the command alone, not of what it reached."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    nothing = subprocess.DEVNULL
    subprocess.run(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, check=True, timeout=120)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = Lab(folder / "state", tethered=True)
        lab.up()
        try:
            result = measure(lab, folder, args.rounds)
        finally:
            lab.down()
    busy = ", ".join(f"{load:.1f}" for load in result["load"])
    print(f"\n{os.cpu_count()} CPUs, load average before and after: {busy}")
    print(f"{'command':46s} {'wall s':>8s} {'min':>7s} {'max':>7s} {'CPU s':>7s} {'ratio':>7s}")
    for row in result["rows"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['command']:46s} {row['wall']:8.3f} {row['min']:7.3f} {row['max']:7.3f} {row['cpu']:7.3f} {ratio:>7s}"
        )
    print(f"round trips of a launch: release missing {result['launch_first']}, present {result['launch_again']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def turns(
    commands: dict[str, Callable[[], list[str]]], rounds: int, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each command, which take turns; ratios are to the first one."""
    times: dict[str, list[tuple[float, float]]] = {command: [] for command in commands}
    for argv in commands.values():
        seconds(argv(), environment)  # warm the file cache
    for _ in range(rounds):
        for command, argv in commands.items():
            times[command].append(seconds(argv(), environment))
    reference = next(iter(times.values()))
    rows = []
    for command, measured in times.items():
        wall = [w for w, _ in measured]
        ratios = [w / r for w, (r, _) in zip(wall, reference, strict=True)]
        rows.append(
            {
                "command": command,
                "wall": statistics.median(wall),
                "min": min(wall),
                "max": max(wall),
                "cpu": statistics.median(cpu for _, cpu in measured),
                "ratio": None if "help" in command else statistics.median(ratios),
            }
        )
    return rows


def measure(lab: Lab, folder: Path, rounds: int) -> dict[str, Any]:
    """Time the commands against a lab that is up."""
    inventory = inventory_for(lab, ROOT)
    inventory["targets"]["quick"] = {**inventory["targets"]["ct200"], "enter": "lxc-attach"}
    dflash = Dflash(lab, folder, ROOT, inventory)
    dflash.job(config={"steps": None})
    first = dflash.json("launch", "job", "--run", "bench-1")["round_trips"]
    dflash("kill", "bench-1", "-y", "--force")
    again = dflash.json("launch", "job", "--run", "bench-2")["round_trips"]

    mine = dflash.env()
    commands: dict[str, Callable[[], list[str]]] = {
        "ssh HOST pct exec 200 -- true": lambda: [*lab.ssh_command(), "pct exec 200 -- true"],
        "dflash status": lambda: dflash.argv("status", "bench-2", "--json"),
        "dflash status, enter: lxc-attach": lambda: dflash.argv("status", "bench-2", "--target", "quick", "--json"),
        "dflash --help": lambda: dflash.argv("--help"),
    }
    load = [os.getloadavg()[0]]
    with lab.slow_pct(PCT_SECONDS):
        rows = turns(commands, rounds, mine)
    dflash("kill", "bench-2", "-y", "--force")

    lab.container("python3", "-c", FILL)
    pulled = folder / "pulled"

    def pull() -> list[str]:
        shutil.rmtree(pulled, ignore_errors=True)
        return dflash.argv("pull", "big", "--to", str(pulled))

    def cat(path: str) -> Callable[[], list[str]]:
        return lambda: [*lab.ssh_command(), f"pct exec 200 -- cat {path}"]

    log = {
        f"ssh HOST pct exec 200 -- cat, {MEGABYTES} MB log": cat(f"{BIG}/log"),
        "dflash tail-logs": lambda: dflash.argv("tail-logs", "big", "--no-follow", "-n", "1000000000"),
    }
    weights = {
        f"ssh HOST pct exec 200 -- cat, {MEGABYTES} MB weights": cat(f"{CHECKPOINT}/weights"),
        "dflash pull": pull,
    }
    rows += turns(log, rounds, mine) + turns(weights, rounds, mine)
    load.append(os.getloadavg()[0])
    clean(lab, ROOT)
    return {
        "rows": rows,
        "launch_first": first,
        "launch_again": again,
        "cpus": os.cpu_count(),
        "load": load,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
