"""A loop over Fabric that reads its data by a loader, and saves in the middle of an epoch where that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_asyncpp.fabric import AsyncPipelineStrategy
from tests.helpers.cases import make_model
from tests.helpers.evaluations import may_have_children
from tests.helpers.resumable import training_loader
from tests.helpers.trainer import Net, Run

EPOCHS = 3
RUN = Run(Net, samples=21)


def read_and_train(kind: str, data: str, folder: str, resumed_from: str = "") -> dict[str, Any]:
    """Train from the beginning, with a checkpoint after every batch and epoch, or from one of them.

    Args:
        kind: of the loader; ``own``: with its own sampler.
        data: folder of litdata's.
        folder: of the checkpoints, ``{batches}.ckpt`` and ``epoch-{epoch}.ckpt``.
        resumed_from: name of the checkpoint.
    """
    L.seed_everything(5, verbose=False)
    strategy = AsyncPipelineStrategy(microbatches=3)
    fabric = L.Fabric(strategy=strategy, devices=dist.get_world_size(), accelerator="cpu")
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = training_loader(RUN, kind, data)
    batches = fabric.setup_dataloaders(loader, use_distributed_sampler="own" not in kind)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": batches, "epoch": 0, "batches": 0}
    if resumed_from:
        fabric.load(Path(folder) / f"{resumed_from}.ckpt", state)
    numbers, losses = [], []

    def save(name: Any) -> None:
        if not resumed_from:
            fabric.save(Path(folder) / f"{name}.ckpt", state)

    with may_have_children():
        for epoch in range(state["epoch"], EPOCHS):
            for batch in batches:
                loss = strategy.training_step(lambda piece: F.mse_loss(model(piece["x"]), piece["y"]), batch)
                optimizer.step()
                numbers.append(batch["number"].tolist() if isinstance(batch, dict) else [])
                losses.append(None if loss is None else loss.item())
                state["batches"] += 1
                save(state["batches"])
            state["epoch"] = epoch + 1
            save(f"epoch-{epoch + 1}")
    strategy.drain()
    assert strategy.session.stage is not None
    named = strategy.session.stage.parameters
    weights = {name: parameter.detach().numpy().copy() for name, parameter in named.items()}
    return {"numbers": numbers, "losses": losses, "weights": weights}
