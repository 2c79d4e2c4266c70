"""The network is found among the attributes of a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.network import network_in, network_name, no_network


def module(**attributes: Any) -> nn.Module:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def net(trained: bool = True, layers: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))).requires_grad_(trained)


class Aliased(nn.Module):
    """Module whose network ``net`` is also its property ``model``."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = net(), net()

    @property
    def model(self) -> nn.Module:
        return self.net


FOUND = {
    "a property": (Aliased, "net"),
    "model": (lambda: module(model=net(), backbone=net()), "model"),
    "the only one": (lambda: module(loss=nn.CrossEntropyLoss(), net=net()), "net"),
    "a frozen teacher beside it": (lambda: module(teacher=net(False), student=net()), "student"),
    "all of it frozen": (lambda: module(net=net(False)), "net"),
}
NOT_FOUND = {
    "nothing": (lambda: module(loss=nn.MSELoss()), "Module has no self.model: assign the network to it"),
    "several": (lambda: module(encoder=net(), decoder=net()), r"several attributes \(self.encoder, self.decoder\)"),
    "its own": (lambda: module(net=net(), scale=nn.Parameter(torch.ones(1))), r"attributes \(self.net, self.scale\)"),
}


@pytest.mark.parametrize("case", FOUND)
def test_found(case: str) -> None:
    make, name = FOUND[case]
    made = make()
    assert network_name(made) == name
    assert network_in(made) is getattr(made, name)


@pytest.mark.parametrize("case", NOT_FOUND)
def test_not_found(case: str) -> None:
    make, problem = NOT_FOUND[case]
    made = make()
    assert network_in(made) is None
    assert network_name(made) == "model"
    with pytest.raises(ValueError, match=problem):
        raise ValueError(no_network(made))


@pytest.mark.parametrize("index", [0, 1])
def test_found_again_once_it_is_cut(index: int) -> None:
    """The network is also found on a stage that trains nothing, for instance if all adapters are on the other stage."""
    made = module(other=net(False, 1), net=net())
    made.net[:2].requires_grad_(False)
    cut(made.net, index, 2, 0, torch.device("cpu"), counts=(2, 2))
    assert network_name(made) == "net"
