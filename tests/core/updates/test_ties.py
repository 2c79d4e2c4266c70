"""Weights that stages share are found before the cut, initialised alike and saved once; unequal copies are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.cut.ties import Tie, check_copies, find_ties, keep_once
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.updates.reduction import TiedGradients, tags_of
from lightning_asyncpp.errors import ConfigurationError
from tests.helpers.cases import DIM, Case
from tests.helpers.engine import assert_same_weights, run_case, run_oracle
from tests.helpers.failing import run_ranks

TIE = Tie((0, 2), ("first", "second"))


@pytest.mark.parametrize("trained", [True, False])
def test_ties_are_found_between_stages_only(trained: bool) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[2].weight = model[3].weight = model[0].weight
    model[0].weight.requires_grad_(trained)
    units = pipeline_units(model)
    assert find_ties(units, [4]) == []
    assert find_ties(units, [2, 2]) == [Tie((0, 1), ("0.weight", "2.weight"))]
    (tie,) = find_ties(units, [1, 2, 1])
    assert tie == Tie((0, 1, 2), ("0.weight", "2.weight", "3.weight"))
    assert [tie.prev_sharing(stage) for stage in tie.stages] == [None, 0, 1]
    assert [tie.next_sharing(stage) for stage in tie.stages] == [1, 2, None]


def test_mini_batches_in_flight_have_different_tags() -> None:
    """Messages from a GPU may overtake each other, so mini-batches have different tags, the same on all stages."""
    whole = [TIE, Tie((1, 2), ("third", "fourth"))]
    tags = [tag for mini_batch in range(4) for tag in tags_of(whole, whole, mini_batch)]
    assert len(set(tags)) == len(tags)
    assert tags_of(whole[1:], whole, 3) == tags[-1:]


def test_a_checkpoint_holds_them_once() -> None:
    state = {"m.first": torch.ones(2), "m.second": torch.ones(2), "m.other": torch.ones(2)}
    keep_once(state, [("m.first", "m.second"), ("m.other", "absent"), ("absent", "m.other")])
    assert state["m.first"] is state["m.second"]
    assert state["m.other"] is not state["m.first"]
    assert len(state) == 3


def test_weights_of_a_model_that_does_not_share_are_refused() -> None:
    check_copies({"first": torch.ones(2)}, [TIE.names])
    check_copies({"first": torch.ones(2), "second": torch.ones(2)}, [TIE.names])
    with pytest.raises(ConfigurationError, match="differ in the checkpoint"):
        check_copies({"first": torch.ones(2), "second": torch.zeros(2)}, [TIE.names])


def middle_shares(first_too: bool, _: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)), nn.Linear(DIM, 1))
    model[3].weight = model[1].weight
    if first_too:
        model[0].weight = model[1].weight
    return model


def sharing(first_too: bool) -> Case:
    return Case(3, model=partial(middle_shares, first_too), cut=(1, 2, 2), batch_sizes=(6,) * 4)


def trained_with_late_sums(mesh: Mesh, first_too: bool) -> dict[str, Any]:
    """Train while the sums of later stages never seem to have arrived, as with a large matrix over a slow network."""
    TiedGradients.have_arrived = lambda self: False  # type: ignore[method-assign]
    result = run_case(sharing(first_too), mesh)
    as_arrays = {kind: {name: p.numpy() for name, p in result[kind].items()} for kind in ("weights", "copies")}
    return {**result, **as_arrays}


@pytest.mark.parametrize("first_too", [False, True])
def test_a_stage_in_the_middle_waits_for_what_it_shares(first_too: bool) -> None:
    """If it put off its control message, for which the previous stage waits, it would wait for activations forever."""
    outcomes = run_ranks(trained_with_late_sums, 3, first_too, timeout=20.0)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert_same_weights([outcome.value for outcome in outcomes], run_oracle(sharing(first_too))[0])
