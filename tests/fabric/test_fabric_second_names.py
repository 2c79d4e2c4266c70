"""Parameters that a model also keeps outside its layers, in Fabric: trained and saved under all names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.cases import Case
from tests.helpers.engine import run_oracle
from tests.helpers.fabric import Run
from tests.helpers.modules import Second
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import arrays


def second(_: float) -> Any:
    return Second(nn.LayerNorm)


CASE = Case(3, optimizer="muon", error_feedback=1.0, max_norm=0.3, model=second, cut=(3, 2))
PAIRS = (("scale", "begin.scale"), ("shared.weight", "end.weight"), ("favourite.0.weight", "blocks.1.0.weight"))


def train_and_gather(case: Case, path: str, resumes: bool) -> dict[str, Any]:
    """Train, saving on the way, or go on from there; the whole model's state."""
    run = Run(case, spoilt=resumes)
    if resumes:
        run.fabric.load(path, run.state)
    else:
        run.train(stop=3)
        run.fabric.save(path, run.state)
    run.train(start=3)
    return arrays(run.strategy.full_state_dict())


@pytest.mark.parametrize("cut", [(5,), pytest.param((3, 2), marks=pytest.mark.slow), (2, 2, 1)])
def test_all_names_hold_the_trained_values(pools: Pools, cut: tuple[int, ...], tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    weights, _ = run_oracle(CASE)
    for case, resumes in ((replace(CASE, cut=cut), False), (CASE, True)):
        whole = pools.run(len(case.counts(0)), train_and_gather, case, path, resumes)[0]
        assert_equal_weights({name: whole[name] for name in weights}, arrays(weights))
        for name, other in PAIRS:
            assert np.array_equal(whole[name], whole[other])
        model = Second(nn.LayerNorm)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in whole.items()})
