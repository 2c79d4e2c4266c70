"""Trainings in which every rank stands still by itself, at one place or another, or is only slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_asyncpp import AsyncPipelineStrategy
from lightning_asyncpp.core.failures import guard
from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricStrategy
from tests.core.cases import make_model
from tests.faults.jobs import Here
from tests.trainer.runs import Net, Run, Samples

SECONDS = 3.0
LEAVE_SECONDS = 1.0
SLOW = 0.4  # of a batch
BATCH, BEFORE = 8, 6
NEVER = 1000.0


def stands_still() -> None:
    time.sleep(NEVER)


class Stuck(Samples):
    """After some batches its file system does not answer."""

    def __init__(self, count: int, batches: int, seconds: float = NEVER) -> None:
        super().__init__(count)
        self._left, self._seconds = batches * BATCH, seconds

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left < 0:
            time.sleep(self._seconds)
        return super().__getitem__(index)


class StuckStream(IterableDataset):
    """Has no length, and does not answer at all."""

    def __iter__(self) -> Iterator[Any]:
        stands_still()
        yield from Samples(BATCH)


class InHook(L.Callback):
    """A hook that does not come back, on all ranks."""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == BEFORE:
            stands_still()


def trainer(stages: int, heartbeat: float | None = 60.0, **more: Any) -> L.Trainer:
    guard.Guard._leave_seconds = LEAVE_SECONDS
    strategy = AsyncPipelineStrategy(micro_batches=2 * stages, timeout=timedelta(seconds=SECONDS), heartbeat=heartbeat)
    arguments: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "max_epochs": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
    }  # fmt: skip
    return L.Trainer(accelerator="cpu", devices=stages, strategy=strategy, **arguments | more)


def loader(batches: int, seconds: float = NEVER, count: int = 12) -> DataLoader:
    return DataLoader(Stuck(count * BATCH, batches, seconds), batch_size=BATCH)


def in_loader(here: Here, stages: int = 2, heartbeat: float | None = 60.0) -> dict[str, Any]:
    trainer(stages, heartbeat).fit(Net(Run(Net)), loader(BEFORE))
    return {}


def in_loader_of_three(here: Here) -> dict[str, Any]:
    return in_loader(here, 3)


def in_loader_unwatched(here: Here) -> dict[str, Any]:
    return in_loader(here, 2, None)


def in_worker(here: Here) -> dict[str, Any]:
    """The data are read in a process beside each rank."""
    data = DataLoader(Stuck(12 * BATCH, BEFORE), batch_size=BATCH, num_workers=1)
    trainer(2).fit(Net(Run(Net)), data)
    return {}


def in_validation(here: Here) -> dict[str, Any]:
    trainer(2).fit(Net(Run(Net)), loader(99), loader(1))
    return {}


def in_first_batch_of_test(here: Here) -> dict[str, Any]:
    trainer(2).test(Net(Run(Net)), DataLoader(StuckStream(), batch_size=BATCH))
    return {}


def in_hook(here: Here) -> dict[str, Any]:
    trainer(2, callbacks=[InHook()]).fit(Net(Run(Net)), loader(99))
    return {}


def slow(here: Here) -> dict[str, Any]:
    """A training and a validation, each of which takes longer than the limit."""
    run = trainer(2, limit_val_batches=9)
    run.fit(Net(Run(Net)), loader(0, SLOW / BATCH), loader(0, SLOW / BATCH))
    return {"step": run.global_step}


class Afterwards(L.Callback):
    """Takes its time when the training is over."""

    def on_fit_end(self, *args: Any) -> None:
        time.sleep(2 * SECONDS)


def busy_around(here: Here) -> dict[str, Any]:
    """What a script does before, between and after its trainings is its own affair."""
    for _ in range(2):
        run = trainer(2, callbacks=[Afterwards()])
        run.fit(Net(Run(Net)), loader(99))
        time.sleep(SECONDS + 1)
    return {"step": run.global_step}


def fabric(here: Here, data: DataLoader, slow_step: bool = False, between: float = 0.0) -> dict[str, Any]:
    guard.Guard._leave_seconds = LEAVE_SECONDS
    strategy = FabricStrategy(micro_batches=4, timeout=timedelta(seconds=SECONDS))
    made = L.Fabric(strategy=strategy, devices=2, accelerator="cpu")
    made.launch()
    model = made.setup_module(make_model())
    optimizer = made.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    steps = 0

    def step_fn(batch: Any) -> Any:
        if slow_step and steps == BEFORE:
            stands_still()
        return (model(batch["x"]) - batch["y"]).square().mean()

    for batch in made.setup_dataloaders(data, use_distributed_sampler=False):
        if steps == 2:
            time.sleep(between)
        strategy.training_step(step_fn, batch)
        optimizer.step()
        steps += 1
    strategy.flush()
    time.sleep(between)
    return {"step": steps}


def in_loader_of_fabric(here: Here) -> dict[str, Any]:
    return fabric(here, loader(BEFORE))


def in_step_of_fabric(here: Here) -> dict[str, Any]:
    return fabric(here, loader(99), slow_step=True)


def busy_fabric(here: Here) -> dict[str, Any]:
    """What a loop does between the strategy's calls is its own affair."""
    return fabric(here, loader(99), between=SECONDS + 2)
