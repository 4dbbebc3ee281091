"""Measures one drafter step, piece by piece."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from trainer import wording
from trainer.bench.shapes import Preset, drafter_step, rows_of, run_config
from trainer.bench.show import console, ran_as, table
from trainer.bench.timing import milliseconds
from trainer.compilation.phase import CompilePhase
from trainer.pipeline.threads import in_worker_thread


def step(options: argparse.Namespace) -> dict[str, Any]:
    """One drafter step, all slots supervised, and its pieces."""
    preset: Preset = options.shape
    device = torch.device(options.device)

    def work(stream: torch.cuda.Stream | None) -> dict[str, Any]:
        made = drafter_step(preset, run_config(options, 1000), device)
        prepared = rows_of(preset, 1, device)[0]
        features = made.feature_buffers()[0].normal_()
        with CompilePhase(options.mode) as phase:
            with phase.turn("drafter 0", device, stream) as turn:
                made.prepare(turn)
            if device.type == "cuda":
                phase.require_compiled()
            phase.close()
            report = phase.reports[0]
            pieces = made.pieces()
            chunks = -(-prepared.valid_slots // made.chunk)
            measured = {
                "load": lambda: made.load(prepared.row, features, None),
                "forward": pieces["forward"],
                "chunks": lambda: [pieces["chunk"]() for _ in range(chunks)],
                "backward": pieces["backward"],
                "update": pieces["update"],
            }
            times = milliseconds(measured, options.steps, device)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        return {
            "milliseconds": times,
            "step_milliseconds": sum(times.values()),
            "chunks": chunks,
            "valid_slots": prepared.valid_slots,
            "peak_gib": peak,
            "compilation": [asdict(report)],
        }

    console.print("measuring one step")
    found: dict[str, Any] = in_worker_thread(device, work)
    table(
        "\n".join(
            [
                f"{options.preset}: {preset.length} tokens, {preset.anchors} anchors of {preset.block}, {options.mode}",
                *ran_as(found["compilation"]),
            ]
        ),
        [*found["milliseconds"].items(), ("step", found["step_milliseconds"])],
        "piece",
        "ms",
    )
    peak = f"; peak GPU memory {found['peak_gib']:.1f} GiB" if found["peak_gib"] is not None else ""
    console.print(f"{wording.count(found['chunks'], 'head chunk')}{peak}")
    return found
