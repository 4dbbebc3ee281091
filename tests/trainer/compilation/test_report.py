"""What a compile report says."""

from __future__ import annotations

import pytest

from trainer.compilation.report import CompileReport


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"mode": "compiled"}, "it runs compiled, not graph"),
        ({"compiled": False}, "not every function was compiled"),
        ({"graph_breaks": 2}, "2 graph breaks"),
        ({"kernels": 0}, "Inductor generated no kernel"),
        ({"captured": []}, "no CUDA graph was captured"),
    ],
)
def test_a_report_says_what_keeps_a_worker_from_the_fast_path(change: dict[str, object], fault: str | None) -> None:
    good: dict[str, object] = {
        "worker": "drafter 0",
        "device": "cuda:0",
        "mode": "graph",
        "compiled": True,
        "graphs": 3,
        "kernels": 40,
        "graph_breaks": 0,
        "recompiles": 0,
        "captured": ["forward"],
        "cache_hits": 0,
        "cache_misses": 3,
        "seconds": 1.0,
    }
    assert CompileReport(**{**good, **change}).shortcoming("graph") == fault  # type: ignore[arg-type]
