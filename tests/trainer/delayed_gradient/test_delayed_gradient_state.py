"""Emulated delays: exact resume, several processes, metrics of micro-batches, and the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torchmetrics import MeanSquaredError

from lightning_asyncpp import ConfigurationError, DelayedGradientStrategy
from lightning_asyncpp.cli import AsyncppCLI
from tests.trainer.checkpoint.test_checkpoints import ResumableNet, saving
from tests.trainer.delayed_gradient.delays import train
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights
from tests.trainer.runs import Net, Run, fit

WAYS: dict[str, dict[str, Any]] = {
    "one": {"delay": 1},
    "three": {"delay": 3},
    "pipedream": {"delay": "pipedream", "stages": 3},
    "fresh": {"delay": "fresh_last_stage", "stages": 2},
    "micro-batches": {"delay": 1, "micro_batches": 3},
    "fresh-in-micro-batches": {"delay": "fresh_last_stage", "stages": 2, "micro_batches": 3},
    "two-in-micro-batches": {"delay": 2, "micro_batches": 3},
    "synchronous-start": {"delay": 2, "synchronous_start": 2},
    "synchronous-start-in-micro-batches": {"delay": 1, "micro_batches": 3, "synchronous_start": 2},
}


# Every delay, with and without micro-batches, from a start with and without delay; others join two of these.
USUAL = ("three", "pipedream", "fresh-in-micro-batches", "two-in-micro-batches", "synchronous-start")


@pytest.mark.parametrize("way", [way if way in USUAL else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(way: str, tmp_path: Path) -> None:
    """Layers that draw random numbers resume exactly in micro-batches; elsewhere Lightning does not save generators."""
    run = Run(
        ResumableNet, "delayed", WAYS[way], callbacks=(saving(tmp_path, every_n_train_steps=1),), samples=37,
        optimizer="muon", error_feedback=True, scheduler="decay-step",
        dropout=0.2 if "micro_batches" in WAYS[way] else 0.0,
        trainer={"max_epochs": 2, "gradient_clip_val": 0.5, "enable_checkpointing": True},
    )  # fmt: skip
    whole = train(run)
    for step in (1, 4):
        resumed = train(replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={step}.ckpt")))
        assert_equal_weights(resumed["weights"], whole["weights"])
        assert resumed["losses"] == whole["losses"][step:]
        assert resumed["rates"] == whole["rates"][step:]


def checkpoint(run: Run, folder: Path) -> str:
    train(replace(run, callbacks=(saving(folder, every_n_train_steps=1),), trainer={"enable_checkpointing": True}))
    return str(folder / "step=3.ckpt")


def test_a_checkpoint_of_another_delay_is_refused(tmp_path: Path) -> None:
    path = checkpoint(Run(Net, "delayed", {"delay": 2}), tmp_path)
    with pytest.raises(ConfigurationError, match="written with delay=2, this run has 1"):
        train(Run(Net, "delayed", ckpt_path=path, trainer={"max_epochs": 2}))


def test_a_checkpoint_of_another_synchronous_start_is_refused_and_an_older_one_had_none(tmp_path: Path) -> None:
    path = checkpoint(Run(Net, "delayed"), tmp_path)
    with pytest.raises(ConfigurationError, match="written with synchronous_start=0, this run has 5"):
        train(Run(Net, "delayed", {"synchronous_start": 5}, ckpt_path=path, trainer={"max_epochs": 2}))
    content = torch.load(path, weights_only=True)
    del content["delayed_gradient"]["synchronous_start"]
    torch.save(content, path)
    train(Run(Net, "delayed", {}, ckpt_path=path, trainer={"max_epochs": 2}))


def test_a_checkpoint_of_another_distribution_over_stages_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"delay": "pipedream", "stages": 2}
    path = checkpoint(Run(Net, "delayed", options), tmp_path)
    others = options | {"stage_of": lambda name: 1}
    with pytest.raises(ConfigurationError, match=r"the gradients of '.*' were 1 updates old, in this run they are 0"):
        train(Run(Net, "delayed", others, ckpt_path=path, trainer={"max_epochs": 2}))


def test_lightnings_own_checkpoints_are_taken_over(tmp_path: Path) -> None:
    """All versions begin with the weights that were loaded."""
    path = checkpoint(Run(ResumableNet, "plain"), tmp_path)
    plain = train(Run(ResumableNet, "plain", ckpt_path=path, trainer={"max_epochs": 2}))
    fresh = train(Run(ResumableNet, "delayed", {"delay": 0}, ckpt_path=path, trainer={"max_epochs": 2}))
    assert_equal_weights(fresh["weights"], plain["weights"])
    old = train(Run(ResumableNet, "delayed", {"delay": 1}, ckpt_path=path, trainer={"max_epochs": 2}))
    assert old["losses"][:1] == plain["losses"][:1]
    assert old["losses"][3:] != plain["losses"][3:]


def test_a_pipelines_checkpoint_is_refused(pools: Pools, tmp_path: Path) -> None:
    callbacks = ((ModelCheckpoint, {"dirpath": tmp_path, "filename": "last"}),)
    pools.run(2, fit, Run(Net, callbacks=callbacks, trainer={"enable_checkpointing": True}))
    with pytest.raises(ConfigurationError, match="was written by a pipeline strategy"):
        train(Run(Net, "delayed", ckpt_path=str(tmp_path / "last.ckpt"), trainer={"max_epochs": 2}))


def test_several_processes_without_delay_are_bitwise_ddp(pools: Pools) -> None:
    run = Run(Net, "ddp", dropout=0.2, samples=37, shuffle=True, optimizer="muon", scheduler="decay-step")
    plain = pools.run(2, fit, run)
    emulated = pools.run(2, fit, replace(run, strategy="delayed", options={"delay": 0}))
    for one, other in zip(plain, emulated):
        assert_equal_weights(other["weights"], one["weights"])
        assert other["losses"] == one["losses"]


@pytest.mark.parametrize("micro_batches", [None, 3])
def test_several_processes_share_one_delayed_gradient(pools: Pools, micro_batches: int | None) -> None:
    """Two processes with half of every batch each train as one with the whole."""
    run = Run(
        Shares, "delayed", {"delay": 2, "micro_batches": micro_batches}, optimizer="adamw", error_feedback=True,
        trainer={"gradient_clip_val": 0.5},
    )  # fmt: skip
    two = pools.run(2, fit, run)
    one = train(run)
    assert_equal_weights(two[0]["weights"], two[1]["weights"])
    for name, array in one["weights"].items():
        np.testing.assert_allclose(two[0]["weights"][name], array, rtol=1e-4, atol=1e-6)


class Shares(Net):
    """Cuts the batch over the processes itself, so that the whole is the same for any number of them."""

    def on_before_batch_transfer(self, batch: dict[str, torch.Tensor], dataloader_idx: int) -> Any:
        rank, size = self.trainer.global_rank, self.trainer.world_size
        return {name: tensor[rank::size] for name, tensor in batch.items()} if self.trainer.training else batch


class Logs(Net):
    """Logs in every way that a step can."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.error = MeanSquaredError()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        output = self.model(batch["x"])
        loss = F.mse_loss(output, batch["y"])
        self.log_dict({"mean": loss, "rows": float(len(batch["x"]))}, on_step=True, on_epoch=True)
        self.log("largest", output.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("total", output.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.error(output, batch["y"])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return {"loss": loss, "output": output}


def test_what_micro_batches_log_is_what_the_pipeline_logs(pools: Pools) -> None:
    run = Run(Logs, "async", {"micro_batches": 3}, samples=37, trainer={"logger": "list", "max_epochs": 2})
    pipeline = pools.run(2, fit, run)[0]
    emulated = train(replace(run, strategy="delayed"))

    def by_step(records: list[Any]) -> dict[tuple[int, str], float]:
        return {(step, name): value for step, metrics in records for name, value in metrics.items()}

    assert by_step(emulated["records"]) == pytest.approx(by_step(pipeline["records"]), rel=1e-6)
    assert emulated["callback_metrics"].keys() == pipeline["callback_metrics"].keys()
    assert emulated["callback_metrics"]["error"] == pytest.approx(emulated["callback_metrics"]["mean_epoch"], rel=1e-5)


def second_half(name: str) -> int:
    return int("blocks.1" in name)


def strategy_of(*arguments: str) -> DelayedGradientStrategy:
    cli = AsyncppCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True,
        auto_configure_optimizers=False, run=False,
        args=["--config", "recipes/quickstart.yaml", "--trainer.devices=1", *arguments],
    )  # fmt: skip
    return cli.trainer.strategy


def test_the_command_line_takes_it_by_name_and_by_class() -> None:
    assert isinstance(strategy_of("--trainer.strategy=delayed_gradient"), DelayedGradientStrategy)
    chosen = ["--trainer.strategy=DelayedGradientStrategy", "--trainer.strategy.stages=4"]
    by_stage = strategy_of(*chosen, "--trainer.strategy.delay=pipedream")
    assert (by_stage.settings.delay, by_stage.settings.stages) == ("pipedream", 4)
    numbered = strategy_of("--trainer.strategy=DelayedGradientStrategy", "--trainer.strategy.delay=3")
    assert numbered.settings.delay == 3
    function = f"--trainer.strategy.stage_of={__name__}.second_half"
    placed = strategy_of(*chosen, "--trainer.strategy.delay=fresh_last_stage", function)
    assert placed.settings.stage_of is second_half
