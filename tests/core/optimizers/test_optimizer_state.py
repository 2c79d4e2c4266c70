"""An optimizer's state by names of parameters: what another optimizer must not take up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_asyncpp.core.optimizers.state_by_name import by_parameter, load_by_parameter
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.optim import MuonAdamW

NAMES = ("weight", "bias", "norm")
CUT = {"partition": [3]}


def parameters() -> dict[str, Tensor]:
    return {name: torch.ones(2, requires_grad=True) for name in NAMES}


def made(groups: list[list[str]], kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Optimizer, dict[str, Tensor]]:
    """An optimizer after a step; every group has another weight decay."""
    named = parameters()
    grouped = [{"params": [named[n] for n in names], "weight_decay": 0.1 * index} for index, names in enumerate(groups)]
    optimizer: Optimizer = kind(grouped, lr=0.1, **options)
    for parameter in named.values():
        parameter.grad = torch.full((2,), 0.5)
    optimizer.step()
    return optimizer, named


def taken_up(groups: list[list[str]], by: list[list[str]], kind: Any = torch.optim.AdamW, **options: Any) -> Optimizer:
    saved = by_parameter(*made(groups), stage=0, cut=CUT)
    optimizer, named = made(by, kind, **options)
    load_by_parameter(optimizer, named, CUT, saved, lambda table, name: table.get(name))
    return optimizer


ONE, TWO = [["weight", "bias", "norm"]], [["weight"], ["bias", "norm"]]


def test_the_same_groups_in_another_order_of_parameters() -> None:
    optimizer = taken_up(TWO, [["weight"], ["norm", "bias"]])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]


@pytest.mark.parametrize(
    ("groups", "by", "said"),
    [
        (ONE, TWO, "parameter groups 0 and 1 of the optimizer divide parameters that were in one group"),
        (TWO, ONE, "parameter group 0 of the optimizer joins parameters that were in groups with different options"),
    ],
)
def test_other_groups(groups: list[list[str]], by: list[list[str]], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        taken_up(groups, by)


@pytest.mark.parametrize(
    ("kind", "options", "lacking"),
    [(torch.optim.SGD, {"momentum": 0.9}, "momentum"), (torch.optim.RMSprop, {}, "alpha")],
)
def test_another_optimizer(kind: Any, options: dict[str, Any], lacking: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"another optimizer: it has .*betas.*, and not the .*{lacking}"):
        taken_up(ONE, ONE, kind, **options)


def test_options_that_a_newer_version_has() -> None:
    saved = by_parameter(*made(ONE), stage=0, cut=CUT)
    for options in saved["groups"].values():
        del options["capturable"]
    optimizer, named = made(ONE, capturable=False)
    load_by_parameter(optimizer, named, CUT, saved, lambda table, name: table.get(name))
    assert optimizer.param_groups[0]["capturable"] is False


def test_options_that_an_older_release_had() -> None:
    def muon() -> tuple[Optimizer, dict[str, Tensor]]:
        named = {"up.weight": torch.ones(2, 3, requires_grad=True), "up.bias": torch.ones(2, requires_grad=True)}
        return MuonAdamW(named.items()), named

    optimizer, named = muon()
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    saved = by_parameter(optimizer, named, stage=0, cut=CUT)
    saved["groups"]["0.0"] |= {"newton_schulz": "quintic", "newton_schulz_scale": "frobenius", "momentum": 0.7}
    again, named = muon()
    load_by_parameter(again, named, CUT, saved, lambda table, name: table.get(name))
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert again.param_groups[0]["momentum"] == 0.7
