"""Idioms of the pages on data and Trainer arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from tests.helpers.modules import Stream, WeighingNet
from tests.helpers.trainer import Net, Samples
from tests.trainer.idioms import SAMPLES, Idiom


class Curriculum(Net):
    """Model that reads attributes of the training loader and changes its dataset."""

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        assert (loader.batch_size, len(loader)) == (8, 3)
        loader.dataset.x = loader.dataset.x * (1 + self.current_epoch)


def without_an_invalid_one(samples: list[Any]) -> Any:
    """Collate samples, or return ``None`` if the first one is the ninth of the training set."""
    return None if torch.equal(samples[0]["x"], Samples(SAMPLES)[8]["x"]) else default_collate(samples)


class Estimated:
    """Batch sampler whose length is only an estimate, and whose epochs differ."""

    epoch = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        yield from ([8 * b + i for i in range(8)] for b in range(2 + self.epoch % 2))


class NothingToCollate(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(SAMPLES), batch_sampler=Estimated(), collate_fn=without_an_invalid_one)


class Combines(Net):
    """Model fed by two streams of different lengths; the shorter one repeats, the longer one has a ``None`` batch."""

    def train_dataloader(self) -> Any:
        streams = [Stream(SAMPLES, 0), Stream(16, 3)]
        loaders = [DataLoader(stream, batch_size=8, collate_fn=without_an_invalid_one) for stream in streams]
        return CombinedLoader(loaders, "max_size_cycle")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = [part for part in batch if part is not None]
        x, y = (torch.cat([part[name] for part in given]) for name in ("x", "y"))
        return F.mse_loss(self.model(x), y)


class TransfersItself(Net):
    """Model whose three transfer hooks each unpack the batch, which a stage in the middle does not have."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(SAMPLES, seed=self.current_epoch), batch_size=8)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 1}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {name: value.to(device) for name, value in batch.items()}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": 2 * batch["x"] + 0.1 * torch.randn_like(batch["x"])}


class TakesTheIterator(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return F.mse_loss(self.model(batch["x"]), batch["y"])


CHANGING_NOTHING = {
    "num_sanity_val_steps": 2, "val_check_interval": 2, "min_epochs": 2, "max_time": "00:01:00:00",
    "detect_anomaly": True, "deterministic": True, "inference_mode": False, "profiler": "simple",
    "sync_batchnorm": True, "enable_model_summary": True,
}  # fmt: skip
IDIOMS = [
    Idiom("train_dataloader.dataset", Curriculum, processes=True),
    Idiom("collate_fn", NothingToCollate, processes=True),
    Idiom("IterableDataset | CombinedLoader", Combines, processes=True),
    Idiom(
        "`on_before_batch | augmentation | reload_", TransfersItself, {"reload_dataloaders_every_n_epochs": 1},
        processes=True,
    ),
    Idiom("dataloader_iter", TakesTheIterator, says="holds no tensor with a batch dimension"),
    Idiom("not padded | precision", WeighingNet, {"precision": "bf16-mixed"}),
    Idiom(
        "limit_ | check_val | max_steps",
        trainer={"limit_train_batches": 2, "check_val_every_n_epoch": 2, "max_steps": 3},
    ),
    Idiom("overfit_", trainer={"overfit_batches": 2}),
    Idiom("fast_dev_run", trainer={"fast_dev_run": True}),
    Idiom(
        "sanity | interval=2 | max_time | anomaly | deterministic | inference | profiler | sync_batchnorm | summary",
        trainer=CHANGING_NOTHING,
    ),
    Idiom('"00:00:15', trainer={"val_check_interval": "00:00:15:00"}, says="val_check_interval is a time"),
]  # fmt: skip
