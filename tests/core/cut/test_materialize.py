"""Meta tensors get the same values for every number of stages; those that no initialiser sets are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.errors import ConfigurationError

CPU = torch.device("cpu")


class Block(nn.Module):
    """Module with its own tensors, which also sets the bias of a child after the children initialised themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain)
        nn.init.zeros_(self.linear.bias)
        self.table.copy_(torch.arange(4.0))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def blocks() -> nn.Module:
    return on_meta(lambda: nn.Sequential(nn.Embedding(5, 4), Block(), nn.Linear(4, 4), Block(), nn.Linear(4, 2)))


def values(num_stages: int, seed: int = 3) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index in range(num_stages):
        torch.manual_seed(100 + index)  # earlier random numbers have no effect
        stage = cut(blocks(), index, num_stages, seed, CPU)
        assert not any(p.is_meta for p in stage.model.parameters())
        found |= stage.state_dict() | {n: b for n, b in stage.model.named_buffers() if n.endswith("table")}
    return found


@pytest.mark.parametrize("num_stages", [2, 4])
def test_initial_values_do_not_depend_on_the_number_of_stages(num_stages: int) -> None:
    whole, pieces = values(1), values(num_stages)
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_parents_have_the_last_word_and_buffers_are_set() -> None:
    state = values(1)
    assert torch.equal(state["1.linear.bias"], torch.zeros(4))
    assert state["1.table"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert state["1.norm.running_var"].tolist() == [1.0] * 4
    assert state["1.norm.num_batches_tracked"].item() == 0


def test_shared_parameters_stay_shared_and_frozen_ones_frozen() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        return model

    model = on_meta(make)
    cut(model, 0, 1, 0, CPU)
    assert model[1].weight is model[0].weight
    assert [p.requires_grad for p in (model[0].weight, model[0].bias, model[1].bias)] == [True, False, True]


class Forgetful(nn.Module):
    """Module that initialises ``kept`` and half of ``partly``, but neither ``lost`` nor ``mask``."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.empty(3))
        self.lost = nn.Parameter(torch.empty(3))
        self.partly = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.kept)
        with torch.no_grad():
            self.partly[:2].fill_(1.0)


class Helpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


def test_what_no_initialiser_sets_is_refused_with_all_names() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Forgetful(), Helpless()))
    with pytest.raises(ConfigurationError) as caught:
        cut(model, 0, 1, 0, CPU)
    assert str(caught.value) == (
        "meta tensors without an initialiser: 1.lost, 1.partly, 1.mask, 2.weight; give their module, or the layer"
        " around it, a reset_parameters() that sets all of them, or build the model with real weights"
    )
