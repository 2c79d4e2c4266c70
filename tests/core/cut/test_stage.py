"""Cutting a model: names stay, units of other stages go, and weights are swapped without a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.errors import ConfigurationError
from tests.core.cut.test_units import Layered
from tests.helpers.cases import DIM, make_model

CPU = torch.device("cpu")


def cut_all(make: Any, num_stages: int, **kwargs: Any) -> list[Stage]:
    return [cut(make(), index, num_stages, 0, CPU, **kwargs) for index in range(num_stages)]


def leaves_of(stage: Stage, factor: float = 1.0) -> dict[str, Tensor]:
    return {name: (p.detach() * factor).requires_grad_() for name, p in stage.parameters.items()}


@pytest.mark.parametrize("make", [make_model, Layered], ids=["Sequential", "pipeline_layers"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
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
        assert (stage.is_first, stage.is_last) == (index == 0, index == num_stages - 1)
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


def test_forward_and_backward_run_on_the_given_weights() -> None:
    stage = cut(make_model(), 0, 1, 0, CPU)
    before = {name: p.detach().clone() for name, p in stage.parameters.items()}
    x = torch.randn(3, DIM)
    double = leaves_of(stage, 2.0)
    output = stage.under(double, lambda: stage.forward((x,), {}, 0, 0, 0))
    stage.under(double, output.sum().backward)
    assert all(leaf.grad is not None for leaf in double.values())
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in stage.parameters.items())
    reference = make_model()
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(2.0)
    expected = reference(x)
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(double[name].grad, p.grad) for name, p in reference.named_parameters())


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_dropout_depends_on_unit_replica_and_microbatch_alone(num_stages: int) -> None:
    def run(seed: int, replica: int, k: int) -> Tensor:
        x = torch.ones(4, DIM)
        for stage in cut_all(lambda: make_model(0.5), num_stages):
            x = stage.forward((x,), {}, seed, replica, k)
        return x

    torch.manual_seed(99)
    state = torch.get_rng_state()
    whole = cut(make_model(0.5), 0, 1, 7, CPU).forward((torch.ones(4, DIM),), {}, 7, 1, 3)
    torch.set_rng_state(state)
    assert torch.equal(run(7, 1, 3), whole)
    for other in ((8, 1, 3), (7, 0, 3), (7, 1, 4)):
        assert not torch.equal(run(*other), whole)


def test_all_reasons_are_named_and_the_model_is_left_whole() -> None:
    root = nn.Module()
    root.model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2), nn.Linear(2, 2))
    root.log_scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError) as caught:
        cut(root.model, 0, 3, 0, CPU, root=root)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 problems:"
    assert lines[1].startswith("  1. parameters outside the layers of self.model: log_scale; ")
    assert lines[2].startswith("  2. SyncBatchNorm (1) synchronises over all ranks")
    assert all(parameter is not None for parameter in (root.model[0].weight, root.model[2].weight))


@pytest.mark.parametrize(
    ("model", "num_stages", "message"),
    [
        (lambda: nn.Linear(2, 2), 1, "the model is a Linear, which the pipeline cannot cut"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU()), 2, "1 layers with parameters, fewer than the 2 stages"),
        (lambda: Layered(lambda m: [m.embedding, m.head]), 2, "parameters outside the layers"),
    ],
    ids=["not cuttable", "few layers", "outside"],
)
def test_refusals(model: Any, num_stages: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cut(model(), 0, num_stages, 0, CPU)
