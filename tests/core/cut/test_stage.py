"""A cut keeps names and values, removes the weights of other stages, and refuses models that it cannot cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.errors import ConfigurationError
from tests.core.cut.test_units import Layered
from tests.helpers.cases import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("make", [make_model, Layered], ids=["Sequential", "pipeline_layers"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_names_and_values_are_those_of_the_whole_model(make: Any, num_stages: int) -> None:
    torch.manual_seed(0)
    state = make().state_dict()
    union: dict[str, Tensor] = {}
    for index in range(num_stages):
        torch.manual_seed(0)
        stage = cut(make(), index, num_stages, 0, CPU)
        own = stage.state_dict()
        assert own.keys() == stage.parameters.keys() == dict(stage.model.named_parameters()).keys()
        assert not own.keys() & union.keys()
        union |= own
    assert union.keys() == state.keys()
    assert all(torch.equal(union[name], state[name]) for name in state)


def test_a_unit_of_another_stage_stays_where_it_is_and_holds_nothing() -> None:
    model = Layered()
    head, shape = model.head, model.head.weight.shape
    stage = cut(model, 0, 2, 0, CPU)
    assert stage.model.head is head
    assert head.weight is None
    assert not list(head.parameters())
    with stage.whole_model():
        assert head.weight.shape == shape
        assert head.weight.untyped_storage().nbytes() == head.weight.element_size()
        names = list(dict(model.named_parameters()))
    assert names == list(dict(Layered().named_parameters()))
    copied = copy.deepcopy(model)
    assert copied.state_dict().keys() == stage.state_dict().keys()


class Counts(nn.Linear):
    """Layer with a state that is no tensor."""

    count = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_the_extra_state_of_layers_of_other_stages_is_not_touched() -> None:
    model = nn.Sequential(Counts(2, 2), Counts(2, 2))
    state = model.state_dict() | {"0._extra_state": 1, "1._extra_state": 2}
    pruned = cut(model, 0, 2, 0, CPU).whole.pruned
    pruned.load(model, state)
    assert (model[0].count, model[1].count) == (1, 0)
    assert model.state_dict().keys() - pruned.names == {"0.weight", "0.bias", "0._extra_state"}


def test_all_reasons_are_named_and_the_model_is_left_whole() -> None:
    root = nn.Module()
    root.model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm1d(2)), nn.Linear(2, 2))
    root.log_scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError) as caught:
        cut(root.model, 0, 3, 0, CPU, root=root)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 problems:"
    assert lines[1].startswith("  1. parameters outside the layers of self.model: log_scale; ")
    assert lines[2].startswith("  2. SyncBatchNorm (1.0) synchronises over all ranks")
    assert all(parameter is not None for parameter in (root.model[0].weight, root.model[2].weight))


def test_what_has_no_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the model is a Linear, which the pipeline cannot cut"):
        cut(nn.Linear(2, 2), 0, 1, 0, CPU)
