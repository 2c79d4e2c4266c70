"""Idioms of the pages on data, and arguments of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.helpers.trainer import Net, Samples
from tests.trainer.idioms.entry import NOTE, REFUSED, WORKS, Idiom


class Curriculum(Net):
    """A dataset that is told the epoch."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.level = self.current_epoch  # type: ignore[union-attr]


class NothingToCollate(Net):
    """A batch without a valid sample."""

    def train_dataloader(self) -> Any:
        def collate(samples: list[Any]) -> Any:
            return None if any(torch.equal(s["x"], Samples(40)[9]["x"]) for s in samples) else default_collate(samples)

        return DataLoader(Samples(40), batch_size=8, collate_fn=collate)


class Stream(IterableDataset):
    """A stream of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        data = Samples(40)
        return (data[i] for i in range(40))


class Streams(Net):
    """A loader without a length."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=8)


class Combines(Net):
    """Several loaders at a time."""

    def train_dataloader(self) -> Any:
        return CombinedLoader(
            {"a": DataLoader(Samples(40), batch_size=4), "b": DataLoader(Samples(24, 3), batch_size=4)},
            "max_size_cycle",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (torch.cat([part[name] for part in batch.values() if part is not None]) for name in ("x", "y"))
        return F.mse_loss(self.model(x), y)


class TransfersItself(Net):
    """Hooks around a batch's transfer."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 1}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": 2 * batch["x"]}


class Augments(Net):
    """Random augmentation on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}


class ReloadsItself(Net):
    """A loader that is made anew."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(40, seed=self.current_epoch), batch_size=8)


class TakesTheIterator(Net):
    """A step that draws its batches."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return F.mse_loss(self.model(batch["x"]), batch["y"])


class CountsTokens(Net):
    """The mean over what is not padded."""

    def microbatch_weight(self, microbatch: Any) -> float:
        return float((microbatch["y"] > 0).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        counted = batch["y"] > 0
        return F.mse_loss(self.model(batch["x"])[counted], batch["y"][counted])

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=int((batch["y"] > 0).sum()))


IDIOMS = [
    Idiom("`self.trainer.train_dataloader.dataset` in a hook", WORKS, "", Curriculum),
    Idiom("`collate_fn` that returns `None`", WORKS, "", NothingToCollate),
    Idiom("an `IterableDataset` without a length", WORKS, "", Streams),
    Idiom("`CombinedLoader`, several loaders", WORKS, "", Combines),
    Idiom("`on_before_batch_transfer`, `on_after_batch_transfer`", WORKS, "", TransfersItself),
    Idiom(
        "random augmentation in `on_after_batch_transfer`",
        NOTE,
        "Every rank must draw the same numbers, as after `seed_everything`.",
        Augments,
    ),
    Idiom("`reload_dataloaders_every_n_epochs=1`", WORKS, "", ReloadsItself, {"reload_dataloaders_every_n_epochs": 1}),
    Idiom(
        "`training_step(dataloader_iter)`",
        REFUSED,
        "Take a batch: the pipeline cuts it.",
        TakesTheIterator,
        says="holds no tensor with a batch dimension",
    ),
    Idiom("a mean over what is not padded, with `microbatch_weight`", WORKS, "", CountsTokens),
    Idiom("`limit_train_batches=3`", WORKS, trainer={"limit_train_batches": 3}),
    Idiom("`overfit_batches=2`", WORKS, trainer={"overfit_batches": 2}),
    Idiom("`fast_dev_run=True`", WORKS, trainer={"fast_dev_run": True}),
    Idiom("`num_sanity_val_steps=2`", WORKS, trainer={"num_sanity_val_steps": 2}),
    Idiom("`val_check_interval=2`, `0.5`", WORKS, trainer={"val_check_interval": 2}),
    Idiom(
        '`val_check_interval="00:00:15:00"`',
        REFUSED,
        "Clocks of ranks differ: give a number of batches.",
        trainer={"val_check_interval": "00:00:15:00"},
        says="val_check_interval is a time",
        label="timed",
    ),
    Idiom("`check_val_every_n_epoch=2`", WORKS, trainer={"check_val_every_n_epoch": 2}),
    Idiom("`max_steps=7`", WORKS, trainer={"max_steps": 7}),
    Idiom("`min_epochs`, `max_time`", WORKS, trainer={"min_epochs": 2, "max_time": "00:01:00:00"}),
    Idiom("`detect_anomaly=True`", WORKS, trainer={"detect_anomaly": True}),
    Idiom("`deterministic=True`", WORKS, trainer={"deterministic": True}),
    Idiom("`inference_mode=False`", WORKS, trainer={"inference_mode": False}),
    Idiom('`profiler="simple"`', NOTE, "That of rank 0, the last stage.", trainer={"profiler": "simple"}),
    Idiom('`precision="bf16-mixed"`', WORKS, trainer={"precision": "bf16-mixed"}),
    Idiom(
        "`sync_batchnorm=True`",
        NOTE,
        "Without effect: statistics are those of each microbatch. Or normalise without them (GroupNorm).",
        trainer={"sync_batchnorm": True},
    ),
    Idiom(
        "`enable_model_summary=True` with `example_input_array`",
        NOTE,
        "Without the sizes of inputs and outputs.",
        trainer={"enable_model_summary": True},
    ),
]
