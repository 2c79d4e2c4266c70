"""Averages of weights: each stage averages its own layers, and checkpoints have all of them, as one process does."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import AveragedModel

from tests.helpers.cases import DIM
from tests.helpers.modules import EMA, HasAverage
from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import Net, Run, arrays, loader, make_trainer, own_state, val_loaders

DELAYED = {"delay": 1, "microbatches": 3}


def averaged(run: Run, epochs: int, path: str) -> dict[str, Any]:
    """Train with validations, save, and tell what is in the file on rank 0."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    trainer = make_trainer(run, max_epochs=epochs)
    before = BeforeEnd()
    trainer.callbacks.append(before)  # type: ignore[attr-defined]
    trainer.fit(module, loader(run), val_loaders(run), ckpt_path=run.ckpt_path, weights_only=False)
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    return {
        "state": arrays(content["state_dict"]),
        "current": arrays(content.get("current_model_state", {})),
        "averaging": arrays(content.get("averaging_state", {})),
        "losses": before.losses,
        "own": own_state(module),
        "trained": before.trained,
    }


class BeforeEnd(L.Callback):
    """Keeps the weights that are trained, at the end of each epoch, and what each validation came to."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.trained: dict[str, np.ndarray] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trained = {name: array.copy() for name, array in arrays(dict(module.state_dict())).items()}

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def joined(results: list[dict[str, Any]], what: str) -> dict[str, Any]:
    return {name: value for result in reversed(results) for name, value in result[what].items()}


@pytest.mark.parametrize("kind", ["callback", "module"])
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_equals_one_process(pools: Pools, tmp_path: Path, stages: int, kind: str) -> None:
    """Averages, weights and validations; and a run that goes on from its checkpoint, on other stages, too."""
    run = Run(Net, options={"microbatches": 3}, samples=24, val_samples=(8,), callbacks=EMA)
    if kind == "module":
        run = dataclasses.replace(run, module=HasAverage, callbacks=())
    one = dataclasses.replace(run, strategy="delayed", options=DELAYED)
    (single,) = pools.run(1, averaged, one, 2, str(tmp_path / "one.ckpt"))
    many = pools.run(stages, averaged, run, 2, str(tmp_path / "many.ckpt"))
    assert_equal(joined(many, "trained"), single["trained"])
    assert many[0]["losses"] == pytest.approx(single["losses"], rel=1e-6)
    for what in ("state", "current", "averaging"):
        assert_equal(many[0][what], single[what])
    assert (many[0]["state"]["model.0.weight"] != single["trained"]["model.0.weight"]).any() == (kind == "callback")

    again = dataclasses.replace(run, ckpt_path=str(tmp_path / "middle.ckpt"))
    pools.run(stages, saved_in_the_middle, run, str(tmp_path / "middle.ckpt"))
    for on in (stages, 5 - stages):
        resumed = pools.run(on, averaged, again, 2, str(tmp_path / "resumed.ckpt"))
        for what in ("state", "current", "averaging"):
            assert_equal(resumed[0][what], single[what])
        assert_equal(joined(resumed, "trained"), single["trained"])


@pytest.mark.parametrize("kind", ["callback", pytest.param("module", marks=pytest.mark.slow)])
@pytest.mark.parametrize("slack", [0, pytest.param("exact", marks=pytest.mark.slow)])
def test_with_the_least_staleness_it_equals_one_process(pools: Pools, tmp_path: Path, kind: str, slack: Any) -> None:
    """Every stage updates its average when it has applied its own update, between two microbatches."""
    least = {"microbatches": 4, "slack": slack, "partition": "uniform"}
    run = Run(Net, options={"staleness": "least"} | least, samples=48, val_samples=(8,), callbacks=EMA)
    if kind == "module":
        run = dataclasses.replace(run, module=HasAverage, callbacks=())
    one = dataclasses.replace(run, strategy="delayed", options={"stages": 3} | least)
    (single,) = pools.run(1, averaged, one, 2, str(tmp_path / "one.ckpt"))
    many = pools.run(3, averaged, run, 2, str(tmp_path / "many.ckpt"))
    for what in ("state", "current", "averaging"):
        assert_equal(many[0][what], single[what])
    assert_equal(joined(many, "trained"), single["trained"])


def saved_in_the_middle(run: Run, path: str) -> None:
    """A run of two epochs that is saved after the first."""
    L.seed_everything(run.seed, verbose=False)

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    trainer = make_trainer(run, max_epochs=2, callbacks=[Saves()])
    trainer.fit(run.module(run), loader(run), val_loaders(run))


@pytest.mark.slow
def test_with_replicas(pools: Pools, tmp_path: Path) -> None:
    """All replicas have the average, which is that of the weights."""
    run = Run(Net, options={"microbatches": 3, "data_parallel_size": 2}, samples=48, val_samples=(16,), callbacks=EMA)
    many = pools.run(4, averaged, run, 2, str(tmp_path / "many.ckpt"))
    for rank in (0, 1):
        assert_equal(many[rank]["own"], many[rank + 2]["own"])
    assert_equal(joined(many, "own"), many[0]["state"])


class Distills(Net):
    """Learns from a copy that stays as it is."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(DIM, DIM) for _ in range(5)], torch.nn.Linear(DIM, 1))
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.model(batch["x"]) - 2 * self.teacher(batch["x"])).square().mean()


class CallsAverage(HasAverage):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.ema(batch["x"]).mean())


def fitted(run: Run) -> dict[str, np.ndarray]:
    module = run.module(run)
    make_trainer(run).fit(module, loader(run), val_loaders(run) or None)
    return arrays(dict(module.named_parameters()))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Run(CallsAverage, val_samples=(8,)), ["must be Tensor, not NoneType"]),
        (
            Run(Net, options={"weight_dtype": "bf16"}, trainer={"precision": "bf16-mixed"}, callbacks=EMA),
            ["weight_dtype"],
        ),
    ],
)
def test_what_cannot_be_right_is_refused(pools: Pools, run: Run, said: list[str]) -> None:
    outcomes = pools.outcomes(2, impatient, fitted, run)
    assert all(outcome.error for outcome in outcomes)
    assert any(all(word in outcome.message for word in said) for outcome in outcomes), outcomes


def test_a_frozen_copy_stays_whole(pools: Pools) -> None:
    """Distillation from a copy of the model, which the last stage runs as a whole."""
    run = Run(Distills, options={"microbatches": 2})
    (single,) = pools.run(1, fitted, dataclasses.replace(run, strategy="delayed", options=DELAYED | run.options))
    many = pools.run(2, fitted, run)
    found = {name: array for result in many for name, array in result.items()}
    assert_equal({n: found[n] for n in found}, {n: single[n] for n in found})


def test_lightnings_callback_is_what_is_expected() -> None:
    """It keeps its average as an attribute, which the strategy finds and cuts."""
    callback = WeightAveraging()
    module = L.LightningModule()
    module.model = torch.nn.Linear(1, 1)
    callback.setup(L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), module, "fit")
    assert any(isinstance(value, AveragedModel) for value in vars(callback).values())
