"""What the tests of emulated delays share: a module that no pipeline could cut, and the rule in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.trainer.reference import mini_batches_of
from tests.trainer.runs import Net, Run, fit, make_scheduler


class Branches(Net):
    """No pipeline could cut this: a recurrent branch beside a convolution with batch norm, tied weights, no `model`."""

    def __init__(self, run: Run) -> None:
        L.LightningModule.__init__(self)
        self.run = run
        self.recurrent = nn.GRU(1, 4, batch_first=True)
        self.convolution = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(run.dropout))
        self.mix = nn.Linear(4, 4)
        self.back = nn.Linear(4, 4)
        self.back.weight = self.mix.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(x.unsqueeze(-1))[0].mean(1) + self.convolution(x.unsqueeze(1)).mean(-1)
        return self.scale * self.back(self.mix(hidden).relu()).sum(-1, keepdim=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "seen": batch["x"].sum()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch["x"]), batch["y"]))


def train(run: Run) -> dict[str, Any]:
    """Fit in this process."""
    return fit(replace(run, trainer={"logger": "list"} | run.trainer))


def delayed(run: Run, **options: Any) -> Run:
    return replace(run, strategy="delayed", options=options)


def by_the_rule(run: Run, delay_of: Callable[[int, int], int], limit: int | None = None) -> dict[str, np.ndarray]:
    """W_{t+1} = W_t - U(g_t), g_t taken where each parameter was its own number of updates ago.

    Args:
        run: what to train; without random layers.
        delay_of: (index of the parameter, number of parameters) -> its delay.
        limit: number of batches; all of the training set if None.
    """
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = run.make_optimizer(list(module.named_parameters()))
    parameters = list(module.parameters())
    delays = [delay_of(i, len(parameters)) for i in range(len(parameters))]
    if hasattr(optimizer, "set_delay"):
        optimizer.set_delay(dict(zip(parameters, delays)))
    scheduler = make_scheduler(run, optimizer)
    history = [[p.detach().clone()] for p in parameters]
    for t, (batch,) in enumerate(mini_batches_of(run, limit=limit)):
        with torch.no_grad():
            for p, versions, delay in zip(parameters, history, delays):
                p.copy_(versions[max(t - delay, 0)])
        optimizer.zero_grad()
        module.training_step(batch, t)["loss"].backward()
        with torch.no_grad():
            for p, versions in zip(parameters, history):
                p.copy_(versions[t])
        optimizer.step()
        if scheduler is not None:
            scheduler["scheduler"].step()
        for p, versions in zip(parameters, history):
            versions.append(p.detach().clone())
    return {name: p.detach().numpy() for name, p in module.named_parameters()}
