"""Measures one optimizer step of the drafter beside the two public trainers, in one process on one device.

    python benchmarks/drafter_step.py --peers DIR --shape qwen3-8b --device cuda --json out.json

DIR holds the unpacked wheels of specforge 0.2.0 and of speculators 0.9.0 with hs-connectors 0.9.0:

    pip download --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0
    unzip specforge-*.whl -d DIR/specforge
    unzip speculators-*.whl -d DIR/speculators; unzip hs_connectors-*.whl -d DIR/speculators

Every contestant gets the same tokens, documents, anchors, layers, vocabulary, decayed cross-entropy, clipping and
AdamW. After warm-up the contestants take turns, a few steps each, for several rounds, so that a drifting clock touches
all of them alike; the table gives the median step and the ratio of medians taken round by round. A contestant that
fails is named with its error and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import ours
import peers

from trainer.bench.timing import seconds, synchronise
from trainer.devices import find_device

CONTESTANTS = {
    "dflash graph": lambda shape, device, dtype, source: ours.drafter_step(shape, device, dtype, mode="graph"),
    "dflash compiled": lambda shape, device, dtype, source: ours.drafter_step(shape, device, dtype, mode="compiled"),
    "dflash eager": lambda shape, device, dtype, source: ours.drafter_step(shape, device, dtype, mode="eager"),
    "dflash graph, muon": lambda shape, device, dtype, source: ours.drafter_step(
        shape, device, dtype, mode="graph", optimizer="muon"
    ),
    "specforge": peers.specforge,
    "speculators": peers.speculators,
    "speculators, muon": lambda shape, device, dtype, source: peers.speculators(
        shape, device, dtype, source, optimizer="muon"
    ),
}


def time_steps(step: peers.Step, device: torch.device, count: int) -> float:
    """Milliseconds per step over `count` steps issued back to back."""
    return seconds(lambda _: step(), count, lambda: synchronise(device), warm_up=0) * 1e3 / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder with the unpacked wheels of the peers")
    parser.add_argument("--shape", choices=sorted(peers.SHAPES), default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a contestant in a round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = find_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = peers.SHAPES[args.shape]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # memory statistics need a context
    names = args.contestants or [n for n in CONTESTANTS if device.type == "cuda" or "graph" not in n]

    steps: dict[str, peers.Step] = {}
    first: dict[str, float] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in names:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            start = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            step = CONTESTANTS[name](shape, device, dtype, args.peers)
            losses = []
            for _ in range(args.warmup):
                loss = step()
                synchronise(device)  # the step may run on a stream of its own
                losses.append(float(loss))
            first[name] = time.perf_counter() - start
            if device.type == "cuda":
                memory[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
            if not all(0 < loss < 1e4 for loss in losses):
                raise RuntimeError(f"losses are not plausible: {losses}")
            steps[name] = step
            print(f"{name}: ready after {first[name]:.1f} s, losses {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
        except Exception as error:  # a peer that cannot run here is a result too
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:400]
            print(f"{name}: FAILED {failed[name]}", flush=True)
        gc.collect()

    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            rounds[name].append(time_steps(step, device, args.steps))

    reference = next(iter(steps), None)
    rows = []
    for name, times in rounds.items():
        ratios = [other / own for own, other in zip(rounds[reference], times, strict=True)]
        rows.append(
            {
                "contestant": name,
                "median_ms": statistics.median(times),
                "min_ms": min(times),
                "max_ms": max(times),
                "tokens_per_second": shape.tokens / statistics.median(times) * 1e3,
                f"times_slower_than_{reference}": statistics.median(ratios),
                "peak_gib": memory.get(name),
                "seconds_to_ready": first[name],
            }
        )
    print(
        f"\n{'contestant':22s} {'median ms':>10s} {'min':>9s} {'max':>9s} {'tokens/s':>10s} {'ratio':>7s} "
        f"{'peak GiB':>9s}"
    )
    for row in rows:
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        print(
            f"{row['contestant']:22s} {row['median_ms']:10.2f} {row['min_ms']:9.2f} {row['max_ms']:9.2f} "
            f"{row['tokens_per_second']:10.0f} {row[f'times_slower_than_{reference}']:7.2f} {peak:>9s}"
        )
    for name, error in failed.items():
        print(f"{name:22s} did not run: {error}")
    document = {
        "shape": args.shape,
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": rows,
        "failed": failed,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
