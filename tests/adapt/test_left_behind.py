"""What a forward keeps in attributes for the step is there, or the step is told where it is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_asyncpp import ConfigurationError, apply_layers, check_model, pipelined
from tests.adapt.test_forwards import DIM, Net


class Keeping(Net):
    """Keeps what a block in the middle gave, and what the last one gave."""

    hidden: Any
    last: Any

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0:
                self.hidden = [x, 3]
        self.last = x.detach()
        return self.out(x)


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "method": lambda hidden, x: hidden[0].square().mean(),
    "attribute": lambda hidden, x: hidden.shape,
    "operator": lambda hidden, x: 0.1 * hidden,
    "with a tensor": lambda hidden, x: x + hidden,
    "function": lambda hidden, x: torch.stack([x, hidden]),
    "iteration": lambda hidden, x: list(hidden),
    "condition": lambda hidden, x: 1 if hidden else 2,
}


@pytest.mark.parametrize("name", USES)
def test_to_use_it_raises(name: str) -> None:
    model, x = pipelined(Keeping(), (torch.randn(2, DIM),)), torch.randn(3, DIM)
    apply_layers(model, x)
    for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(
            ConfigurationError, match=r"Keeping\.hidden was kept by forward, .* what blocks\.0 returned"
        ):
            USES[name](found.hidden, x)
        assert found.last.shape == x.shape, "the last part computed it"
    model(x)
    assert model.hidden[0].isfinite().all(), "its own forward keeps it as ever"


class Penalised(L.LightningModule):
    """Its loss takes a hidden value; the loss was NaN, and the training went on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = pipelined(Keeping(), (torch.randn(2, DIM),))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.model(x).square().mean() + 0.1 * self.model.hidden[0].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_loss_that_takes_it() -> None:
    with pytest.raises(ConfigurationError, match="have forward return it"):
        check_model(Penalised(), [torch.randn(4, DIM)])
