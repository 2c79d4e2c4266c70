"""A training during which every rank writes what it listens on: FOLDER trainer|fabric DEVICES STRATEGY-ARGUMENTS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_asyncpp.core.wire.connect import Listener
from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricStrategy
from lightning_asyncpp.trainer import AsyncPipelineStrategy
from tests.helpers.cases import Case, make_model
from tests.helpers.trainer import Net, Run, Samples
from tests.trainer.launching.sockets import listening_addresses

AT_SETUP: list[str] = []  # what was listened on while the stages found each other


def write(folder: Path, rank: int) -> None:
    found = {
        "at setup": AT_SETUP,
        "in training": listening_addresses(),
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


def watch_setup() -> None:
    answer = Listener.answer

    def watched(self: Listener, *args: Any, **kwargs: Any) -> Any:
        AT_SETUP[:] = listening_addresses()
        return answer(self, *args, **kwargs)

    Listener.answer = watched  # type: ignore[method-assign]


class Writes(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2:
            write(self.folder, trainer.global_rank)


def with_trainer(folder: Path, devices: int, arguments: dict[str, Any]) -> None:
    loader = torch.utils.data.DataLoader(Samples(64), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=AsyncPipelineStrategy(**arguments), logger=False, max_steps=4,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[Writes(folder)],
    )  # fmt: skip
    trainer.fit(Net(Run(Net)), loader)


def with_fabric(folder: Path, devices: int, arguments: dict[str, Any]) -> None:
    strategy = FabricStrategy(**arguments)
    fabric = L.Fabric(strategy=strategy, devices=devices, accelerator="cpu")
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    case = Case(devices, batch_sizes=(6,) * 3)
    for index in range(3):
        strategy.training_step(case.step(model), case.batch(index))
        optimizer.step()
    write(folder, fabric.global_rank)
    strategy.drain()


def train(folder: Path, kind: str, devices: int, arguments: dict[str, Any]) -> None:
    watch_setup()
    L.seed_everything(1)
    {"trainer": with_trainer, "fabric": with_fabric}[kind](folder, devices, arguments)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
