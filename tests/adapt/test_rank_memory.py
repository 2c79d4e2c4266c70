"""Ranks that cut the same saved model share its weights: none has a copy of its own until it changes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_rank_has_no_copy_of_the_weights(tmp_path: Path) -> None:
    from tests.adapt.rank_memory import of_a_rank, save

    weights = save(str(tmp_path), "bfloat16", hidden_size=512, num_hidden_layers=8)  # too many to compare gradients
    found = of_a_rank(str(tmp_path), "bfloat16", rank=0)
    assert found["cut"] < 0.4 * weights, found
