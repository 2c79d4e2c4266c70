"""What a checkpoint must hold for a run to go on as it would have, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.checkpoint import load_pipeline_state, stage_pipeline_state
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError
from tests.helpers.cases import DIM, Case
from tests.helpers.compare import assert_same_weights
from tests.helpers.engine import Training, run_oracle
from tests.helpers.engine_pool import EnginePools
from tests.helpers.random_layers import make

SHARING_INSIDE = partial(make, (("linear", "tensor"), ("inside", "tensor")))
ALONE = Mesh(1, 1, 0)


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_that_have_two_names_in_one_layer_are_saved_as_one(engine_pools: EnginePools, bf16: bool) -> None:
    """With masters, both names stand for what gradients are taken at."""
    case = Case(3, model=SHARING_INSIDE, bf16=bf16, error_feedback=1.0, resumes=(2,))
    assert_same_weights(engine_pools.run(case, 2), run_oracle(case)[0])


def frozen_and_shared(_: float) -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)), nn.Linear(DIM, 1))
    model[1].weight = model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    return model


def test_frozen_weights_may_be_shared_by_any_number_of_stages(engine_pools: EnginePools) -> None:
    case = Case(4, model=frozen_and_shared, cut=(1, 1, 2), bf16=True, error_feedback=1.0, resumes=(1,))
    assert_same_weights(engine_pools.run(case, 3), run_oracle(case)[0])


def trained(case: Case) -> Training:
    training = Training(case, ALONE)
    for i in range(2):
        training.complete([training.engine.run(case.batch(i), case.step(training.model))])
    training.drain()
    return training


def test_weights_kept_in_another_way_are_refused() -> None:
    case = Case(3, model=SHARING_INSIDE)
    state = {**stage_pipeline_state(trained(case).session), "weight_dtype": "bf16"}
    with pytest.raises(ConfigurationError, match="written with weight_dtype='bf16', this run has None"):
        load_pipeline_state(Training(case, ALONE).session, state)


def test_a_weight_without_an_older_version_is_its_own() -> None:
    case = Case(3, model=SHARING_INSIDE)
    state = stage_pipeline_state(trained(case).session)
    kept = state["older_weights"].pop("1.inner.first.weight")
    other = Training(case, ALONE)
    newest = other.model.state_dict()
    load_pipeline_state(other.session, state)
    older = other.engine.weights.older() or {}
    assert torch.equal(older["1.inner.first.weight"], newest["1.inner.first.weight"])
    assert not torch.equal(kept, newest["1.inner.first.weight"])
    assert torch.equal(older["0.inner.weight"], state["older_weights"]["0.inner.weight"])
