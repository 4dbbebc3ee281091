"""Positions: who has learned a vector for each is known without the weights."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.trainer.tiny_models import FAMILIES, SIZES
from trainer.target.positions import learned_positions

TABLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "gptj": {"rotary_dim": 8},
    "biogpt": {},
}


@pytest.mark.parametrize("family", TABLES)
def test_a_table_of_positions_ends_where_the_configuration_says(family: str) -> None:
    assert learned_positions(CONFIG_MAPPING[family](**SIZES | TABLES[family])) == 256


@pytest.mark.parametrize("family", [*FAMILIES, "bloom", "xglm"])
def test_computed_positions_have_no_end(family: str) -> None:
    assert learned_positions(CONFIG_MAPPING[family](**SIZES | FAMILIES.get(family, {}))) is None


def test_a_table_of_words_of_the_same_length_is_none_of_positions() -> None:
    assert learned_positions(CONFIG_MAPPING["llama"](**SIZES | {"vocab_size": 256})) is None
