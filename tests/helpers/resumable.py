"""Loaders that can resume in mid-epoch, and a module whose training shows everything that a resume could lose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from tests.helpers.evaluations import may_have_children
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, make_trainer, report, staged


class NumberedSamples(Dataset):
    """Dataset whose samples contain their number; if ``noisy``, the process's generators add noise to them."""

    def __init__(self, count: int, noisy: bool) -> None:
        self.samples, self.noisy = Samples(count), noisy

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        if self.noisy:
            sample["x"] = sample["x"] + 0.01 * (torch.rand(()) + random.random() + float(np.random.rand()))
        return {**sample, "number": torch.tensor(index)}


def write_litdata(folder: Path, count: int) -> None:
    """Write the samples as a litdata dataset of several chunks."""
    samples = NumberedSamples(count, noisy=False)
    cache = Cache(str(folder), chunk_size=5)
    for index in range(count):
        cache[index] = samples[index]
    cache.done()
    cache.merge()


def training_loader(run: Run, kind: str, folder: str, samples: Callable[[int, bool], Dataset] = NumberedSamples) -> Any:
    """Make a loader by words: ``plain``, ``stateful`` (torchdata), ``litdata``; ``noisy``, ``workers``, ``two``, ..."""
    if "two" in kind:
        few = replace(run, samples=2 * run.batch_size)
        loaders = [training_loader(each, kind.replace("two", ""), folder, samples) for each in (run, few)]
        return CombinedLoader(loaders, "max_size")
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"} if "workers" in kind else {}
    if "litdata" in kind:
        data: Any = StreamingDataset(folder, shuffle=True, drop_last=False)
        if "combined" in kind:
            again = StreamingDataset(folder, shuffle=True, drop_last=False, seed=7)
            data = CombinedStreamingDataset([data, again], seed=3, iterate_over_all=True)
        return StreamingDataLoader(data, batch_size=run.batch_size, **workers)
    make = StatefulDataLoader if "stateful" in kind else DataLoader
    data = samples(run.samples, "noisy" in kind)
    generator = torch.Generator().manual_seed(run.seed) if "generator" in kind else None
    return make(data, run.batch_size, shuffle=True, generator=generator, **workers)


class Showing(Net):
    """Module that logs epoch values in every way, draws random numbers in a hook, and records its sample numbers."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.error, self.val_error = MeanSquaredError(), MeanSquaredError()
        self.numbers: list[list[int]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        output = self.model(batch["x"])
        self.numbers.append(batch["number"].tolist())  # on the last stage only: on others the step ends in the model
        loss = F.mse_loss(output, batch["y"])
        self.error(output, batch["y"])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("total", loss, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("highest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        output = self.model(batch["x"])
        self.val_error(output, batch["y"])
        self.log("val_loss", F.mse_loss(output, batch["y"]))
        self.log("val_error", self.val_error)

    def on_train_batch_start(self, *_: Any) -> None:
        self.log("drawn", torch.rand(()) + random.random(), on_step=True, on_epoch=True)


class SavesAfter(ModelCheckpoint):
    """Checkpoint callback that saves after every step, or only after some so that nothing drains in between."""

    def __init__(self, steps: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.steps is None or trainer.global_step in self.steps:
            super().on_train_batch_end(trainer, *args)


def fit_showing(
    run: Run, kind: str, folder: str, *, make: Callable[[Run], Showing] = Showing,
    callbacks: Sequence[L.Callback] = (), samples: Callable[[int, bool], Dataset] = NumberedSamples,
) -> dict[str, Any]:  # fmt: skip
    """Train and return a report; ``numbers`` are the sample numbers of each microbatch, on the last stage."""
    L.seed_everything(run.seed, verbose=False)
    module = make(run)
    trainer = make_trainer(run, callbacks=list(callbacks))
    vals = DataLoader(NumberedSamples(9, False), batch_size=4) if run.val_samples else None
    loader = training_loader(run, kind, folder, samples)
    with may_have_children():
        trainer.fit(module, loader, vals, ckpt_path=run.ckpt_path, weights_only=True)
    return report(trainer, module) | {"numbers": module.numbers}


class ResumableLoader(DataLoader):
    """DataLoader that can resume in mid-epoch, as a StatefulDataLoader does."""

    start = done = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for index, batch in enumerate(super().__iter__()):
            self.done = index + 1
            if index >= start:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done % len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class ResumableNet(Net):
    def train_dataloader(self) -> Any:
        return ResumableLoader(Samples(self.run.samples), batch_size=self.run.batch_size)


def saving(folder: Path, **when: Any) -> Any:
    return (ModelCheckpoint, {"dirpath": folder, "save_top_k": -1, "filename": "{step}"} | when)


RESUMABLE_RUN = Run(Net, dropout=0.2, optimizer="muon", error_feedback=True, scheduler="decay-step", samples=37)
RESUMABLE_TRAINER = {"max_epochs": 3, "gradient_clip_val": 0.5, "enable_checkpointing": True, "logger": "list"}
EPOCHS = {"max_epochs": 3}
TWO_EPOCHS = {"max_epochs": 2}
SAVING = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": 1}


def run_of(folder: Path, kind: str, trainer: dict[str, Any], val_samples: tuple[int, ...] = (), **more: Any) -> Run:
    options = {"gradient_clip_val": 0.5, "enable_checkpointing": True, "logger": "list"}
    return Run(
        Net, dropout=0.2, optimizer="muon", error_feedback=True, val_samples=val_samples,
        shuffle="own" not in kind,
        callbacks=((SavesAfter, {"dirpath": folder} | SAVING),), trainer=options | trainer,
        **{"strategy": "default", "scheduler": "decay-step", "samples": 37} | more,
    )  # fmt: skip


def saving_after(run: Run, *steps: int) -> Run:
    """Return the same run, but saving after these steps only."""
    *callbacks, (saves, options) = run.callbacks
    return replace(run, callbacks=(*callbacks, (saves, options | {"steps": steps})))


def of_steps(report: dict[str, Any]) -> dict[int, list[float]]:
    """Return step -> logged loss and random number. Epoch means are left out: after a resume they lack batches."""
    found: dict[int, list[float]] = {}
    for step, metrics in report["records"]:
        found.setdefault(step, []).extend(value for name, value in sorted(metrics.items()) if name.endswith("_step"))
    return {step: values for step, values in found.items() if values}


class OneProcess:
    """Stand-in for pools that runs all stages in this process."""

    def run(self, stages: int, scenario: Any, run: Run, *args: Any) -> list[Any]:
        """Run a scenario with a strategy that emulates ``stages`` stages, and return its value in a list."""
        return [scenario(staged(run, stages), *args)]


ONE_PROCESS = OneProcess()


def check_resumed(
    pools: Pools | OneProcess, run: Run, kind: str, folder: Path, steps: Sequence[int], stages: int = 2,
    fit: Any = fit_showing,
) -> list[Any]:  # fmt: skip
    """Check that runs resumed after each step equal the rest of the whole run; return the whole run's results."""
    if "litdata" in kind:
        write_litdata(folder / "data", run.samples)
    processes = stages * run.options.get("data_parallel_size", 1)
    saving = saving_after(run, *steps) if run.callbacks[-1][0] is SavesAfter else run
    whole = pools.run(processes, fit, saving, kind, str(folder / "data"))
    for step in steps:
        again = replace(run, callbacks=run.callbacks[:-1], ckpt_path=str(folder / f"step={step}.ckpt"))
        resumed = pools.run(processes, fit, again, kind, str(folder / "data"))
        assert resumed[0]["numbers"]
        assert resumed[0]["numbers"] == whole[0]["numbers"][-len(resumed[0]["numbers"]) :], step
        assert of_steps(resumed[0]) == {at: loss for at, loss in of_steps(whole[0]).items() if at >= step}
        assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
    return whole
