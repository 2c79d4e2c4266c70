"""What layers leave in a list that nothing clears, since a pipeline does not run the model's forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, apply_layers, check_model
from lightning_asyncpp.core.step.kept_tensors import run_backward

DIM = 4


class Layer(nn.Module):
    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(DIM, DIM), losses

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        self.losses.append(x.square().mean())
        return x


class Net(nn.Module):
    """Its forward clears what its layers fill."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), Layer(self.losses)])

    def pipeline_layers(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Any:
        self.losses.clear()
        return apply_layers(self, x)


@pytest.mark.parametrize("stages", [1, 2])
def test_it_is_named_with_the_mend(stages: int) -> None:
    def step(model: Any, batch: Tensor) -> Tensor:
        return model(batch).mean() + sum(model.losses)

    with pytest.raises(
        ConfigurationError,
        match=r"^losses, layers\.1\.losses: the loss depends on what an earlier .*add_auxiliary_loss",
    ):
        check_model(Net(), [torch.ones(4, DIM)], step, stages=stages, micro_batches=2, updates=1)


@pytest.mark.parametrize("kept", [[], {}], ids=["list", "dict"])
def test_containers_are_named_before_tensors(kept: Any) -> None:
    """Such as the weight that an older weight_norm computes in every forward."""
    root, weight = nn.Module(), torch.ones((), requires_grad=True)
    root.part = nn.Module()
    loss = weight.exp()
    if isinstance(kept, dict):
        kept["loss"] = loss
    else:
        kept.append(loss)
    root.part.kept, root.computed = kept, weight.exp()
    run_backward([loss], [torch.ones(())], root)
    with pytest.raises(ConfigurationError, match=r"^part\.kept: the loss depends"):
        run_backward([loss], [torch.ones(())], root)


def test_other_errors_are_what_they_are() -> None:
    loss = torch.ones((), requires_grad=True).exp()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        run_backward([loss], [torch.ones(2)], nn.Module())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        run_backward([loss], [torch.ones(())], nn.Module())  # nobody keeps anything
