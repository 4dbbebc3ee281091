"""Targets on a GPU: the variable-length kernel agrees with each document alone, and its pass can be captured."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.target.test_model import HIDDEN, ONE_BY_ONE, TAPS, build, config_of, documents_of, row
from trainer.compilation.phase import CompilePhase
from trainer.compilation.report import Mode
from trainer.data import Documents, Row, RowSource
from trainer.pipeline.threads import in_worker_thread
from trainer.target.features import FeatureMaker
from trainer.target.model import Target
from trainer.target.trial import disagreement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

__all__ = ["row"]

PACKED = ["llama", "qwen3", "qwen3_moe", "gemma", "gemma3_text", "gpt_oss", "mistral", "granite", "cohere"]
OTHERS = ["gemma2", "gemma4_text", *sorted(ONE_BY_ONE)]


@pytest.mark.parametrize("family", PACKED + OTHERS)
def test_features_of_a_packed_row_are_those_of_each_document_alone(family: str, row: Row) -> None:
    target = Target(build(config_of(family)).half(), TAPS, "cuda")
    assert target.packed == (family not in ONE_BY_ONE)
    if family in PACKED:
        assert target.attention == "varlen"
    mine = target.features(row).hidden
    assert mine.shape == (128, len(TAPS) * HIDDEN)
    target = Target(build(config_of(family)).half().float(), TAPS, "cuda")
    target.attention = "unpacked"
    reference = target.features(row).hidden
    tokens = row.loss_mask
    assert disagreement(mine[tokens], reference[tokens]) < 0.01


@pytest.mark.parametrize("mode", ["graph", "compiled"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_every_row_gets_the_same_features_by_compiled_layers_in_a_graph(family: str, mode: Mode) -> None:
    device = torch.device("cuda:0")
    target = Target(build(config_of(family)).to(torch.bfloat16), TAPS, device)
    exact = Target(build(config_of(family)).to(torch.bfloat16).float(), TAPS, device)
    assert not target.uncapturable
    lengths = (20, 13, 11, 31, 19, 60, 90, 7, 9, 100)
    documents = [
        ([3 + (7 * n * n + 11 * d) % 90 for n in range(size)], [True] * size) for d, size in enumerate(lengths)
    ]
    rows = RowSource(Documents.from_lists(documents), sequence_length=128, anchors_per_row=16, epochs=2, seed=0)
    maker = FeatureMaker(target, rows.shape)

    def work(stream: torch.cuda.Stream | None) -> None:
        with CompilePhase(mode) as phase:
            with phase.turn("target 0", device, stream) as turn:
                maker.prepare(turn)
            report = phase.reports[0]
            assert report.compiled == (mode == "graph"), report
            assert report.recompiles == report.graph_breaks == 0
            # Gemma's layers are of two kinds here, with a window and without.
            assert report.graphs == (0 if mode == "compiled" else 2 if family == "gemma3_text" else 1)
            phase.close()
            for number in range(rows.total_rows):
                row = rows.row(number)
                made, right = maker.make(row).hidden, exact.features(row).hidden
                for document in documents_of(row):
                    assert disagreement(made[document], right[document]) < 0.03
                assert made.isfinite().all()

    in_worker_thread(device, work)
