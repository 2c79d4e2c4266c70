"""Models of one's own, as they are: cut between their layers, they train as a single process does."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_asyncpp import check_model, pipelined
from lightning_asyncpp.adapt.modes import MOST_RUNS
from tests.adapt.home_made import HOME_MADE, Pairs, tokens
from tests.adapt.models import Trained


@pytest.mark.parametrize("name", HOME_MADE)
def test_trains_as_a_single_process_does(name: str) -> None:
    make, batch, expected = HOME_MADE[name]
    torch.manual_seed(0)
    module = Trained(make())
    given = [batch() for _ in range(3)]
    report = check_model(module, [x if isinstance(x, dict) else {"x": x} for x in given], stages=2)
    assert report.ok, str(report)
    layers = [name for stage in report.stages for name in stage]
    assert set(expected) <= set(layers)
    assert sorted(module.state_dict()) == sorted(Trained(make()).state_dict())


def test_code_between_many_layers_runs_a_few_times() -> None:
    """Some of the layers are part of that code; what many of them returned crosses the cuts, which is said."""
    with pytest.warns(UserWarning, match=r"Pairs puts together what its layers return .* up to 1\d of their results"):
        model = pipelined(Pairs(count=9))
    assert len(model.pipeline_layers.program.blocks) == MOST_RUNS
    report = check_model(Trained(model), [{"x": tokens()} for _ in range(2)], stages=3)
    assert report.ok, str(report)


def test_a_few_results_that_cross_are_no_reason_to_say_so() -> None:
    make, batch, _ = HOME_MADE["unet"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipelined(make(), batch())
