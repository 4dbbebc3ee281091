"""Targets on a GPU: the variable-length kernel agrees with each document alone, and its pass can be captured."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.test_target import HIDDEN, ONE_BY_ONE, TAPS, build, config_of, documents_of, row
from trainer.data import Documents, Row, RowSource
from trainer.target import Target, TargetInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

__all__ = ["row"]

PACKED = ["llama", "qwen3", "qwen3_moe", "gemma", "gemma3_text", "gpt_oss", "mistral", "granite", "cohere"]
OTHERS = ["gemma2", "gemma4_text", *sorted(ONE_BY_ONE)]


def relative(mine: torch.Tensor, right: torch.Tensor) -> float:
    """Median over tokens: a router may send single tokens elsewhere after rounding."""
    return float(((mine.float() - right).norm(dim=-1) / right.norm(dim=-1)).median())


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
    assert relative(mine[tokens], reference[tokens]) < 0.01


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_a_captured_pass_gives_the_same_features_for_every_row(family: str) -> None:
    target = Target(build(config_of(family)).to(torch.bfloat16), TAPS, "cuda")
    assert target.capturable
    lengths = (20, 13, 11, 31, 19, 60, 90, 7, 9, 100)
    documents = [
        ([3 + (7 * n * n + 11 * d) % 90 for n in range(size)], [True] * size) for d, size in enumerate(lengths)
    ]
    rows = RowSource(Documents.from_lists(documents), sequence_length=128, anchors_per_row=16, epochs=2, seed=0)
    buffers = TargetInputs.blank(rows.shape, torch.device("cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        target.forward(buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = target.forward(buffers).hidden
    for number in range(rows.total_rows):
        row = rows.row(number)
        expected = target.features(row).hidden
        buffers.copy_(TargetInputs.of(row, rows.shape))
        graph.replay()
        for document in documents_of(row):
            assert torch.equal(captured[document], expected[document])
        assert captured.isfinite().all()
