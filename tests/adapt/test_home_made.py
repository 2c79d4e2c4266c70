"""Models of one's own, as they are: cut between their layers, they train as a single process does."""

from __future__ import annotations

import pytest
import torch

from lightning_asyncpp import check_model
from tests.adapt.home_made import HOME_MADE
from tests.helpers.models import Trained, assert_trains

ROUNDED = ("translation", "denoiser")
"""A value is used on both stages."""


@pytest.mark.parametrize("name", HOME_MADE)
def test_trains_as_a_single_process_does(name: str) -> None:
    make, batch, expected = HOME_MADE[name]
    torch.manual_seed(0)
    module = Trained(make())
    given = [batch() for _ in range(3)]
    report = check_model(module, [x if isinstance(x, dict) else {"x": x} for x in given], stages=2)
    assert_trains(report, is_exact=name not in ROUNDED)
    units = [name for stage in report.stages for name in stage]
    assert set(expected) <= {unit.split(" + ")[-1] for unit in units}, "a unit ends with its block"
    assert sorted(module.state_dict()) == sorted(Trained(make()).state_dict())
