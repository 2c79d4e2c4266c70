"""When checkpoints are taken, which one training returns to, and when it validates."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.oracle import assert_equal_weights, joined_weights, loss_after, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import ResumableNet
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer, report, val_loaders


def saving(folder: Path, **when: Any) -> Any:
    return (ModelCheckpoint, {"dirpath": folder, "filename": "{step}"} | when)


def test_resumed_from_last(pools: Pools, tmp_path: Path) -> None:
    """Another Trainer with the same ModelCheckpoint finds the newest file by itself, and goes on as if nothing was."""
    run = Run(Net, dropout=0.2, scheduler="decay-step", shuffle=True)
    whole = pools.run(2, fit, replace(run, trainer={"max_epochs": 3}))
    run = replace(run, callbacks=(saving(tmp_path, save_last=True),), ckpt_path="last")
    for epochs, first in ((1, 1), (3, 6)):
        trainer = {"max_epochs": epochs, "enable_checkpointing": True}
        resumed = pools.run(2, fit, replace(run, trainer=trainer))
        assert resumed[0]["steps"][0] == first
    assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


def fit_and_return_to_the_best(run: Run) -> dict[str, Any]:
    """``validate(ckpt_path="best")`` after ``fit``, and more training from the best."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run), val_loaders(run))
    at_end = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}
    (validated,) = trainer.validate(module, val_loaders(run), ckpt_path="best", verbose=False)
    best = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}
    callback = trainer.checkpoint_callback
    seen = {"path": Path(callback.best_model_path).name, "score": float(callback.best_model_score)}  # type: ignore
    trainer.fit(module, loader(run), val_loaders(run), ckpt_path="best", weights_only=True)
    return report(trainer, module) | seen | {"at_end": at_end, "best": best, "val_loss": validated["val_loss"]}


def test_back_to_the_best(pools: Pools, tmp_path: Path) -> None:
    """The best is the first of three epochs: the targets are noise."""
    run = Run(Net, callbacks=(saving(tmp_path, monitor="val_loss"),), val_samples=(8,))
    run = replace(run, trainer={"max_epochs": 3, "enable_checkpointing": True})
    results = pools.run(2, fit_and_return_to_the_best, run)
    expected = {epochs: oracle(run, 2, list(mini_batches_of(run, epochs)))[0] for epochs in (1, 3)}
    assert {result["path"] for result in results} == {"step=5.ckpt"}
    for name, epochs in (("at_end", 3), ("best", 1), ("weights", 3)):
        joined = joined_weights([{"weights": result[name]} for result in results], 2)
        assert_equal_weights(joined, expected[epochs])
    for result in results:
        assert result["val_loss"] == pytest.approx(result["score"], rel=1e-6)
        assert result["steps"] == [*range(1, 16), *range(6, 16)]


def test_checkpoints_by_time(pools: Pools, tmp_path: Path) -> None:
    """Rank 0's clock decides for all; a file that was saved in mid-epoch resumes to the same end."""
    callbacks = (saving(tmp_path, train_time_interval=timedelta(microseconds=1), save_top_k=-1),)
    run = Run(ResumableNet, dropout=0.2, trainer={"max_epochs": 2, "enable_checkpointing": True}, callbacks=callbacks)
    whole = pools.run(2, fit, run)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == sorted(f"step={step}.ckpt" for step in range(1, 11))
    batches = list(mini_batches_of(run, 2))
    for step in (2, 7):
        content = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_equal_weights(arrays(content["state_dict"]), oracle(run, 2, batches[:step])[0])
    resumed = pools.run(2, fit, replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=7.ckpt")))
    assert resumed[0]["steps"] == [8, 9, 10]
    assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


def test_the_best_by_time(pools: Pools, tmp_path: Path) -> None:
    """All ranks know what the batch logged, although it drains nowhere."""
    options = {"train_time_interval": timedelta(microseconds=1), "monitor": "train_loss"}
    run = Run(Net, trainer={"enable_checkpointing": True}, callbacks=(saving(tmp_path, **options),))
    results = pools.run(2, fit, run)
    losses = results[0]["losses"]
    best = f"step={1 + losses.index(min(losses))}.ckpt"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [best]
    assert [[Path(path).name for path in result["monitors"]] for result in results] == [[best]] * 2


@pytest.mark.parametrize(
    ("trainer", "validated"),
    [
        ({"val_check_interval": 0.5, "max_epochs": 2}, [2, 4, 7, 9]),
        ({"check_val_every_n_epoch": 2, "max_epochs": 5}, [10, 20]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4, "max_epochs": 2}, [4, 8]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_when_it_validates(pools: Pools, trainer: dict[str, Any], validated: list[int]) -> None:
    """After the same batches as a plain run, on the weights of all updates so far, without a trace in training."""
    run = Run(Net, val_samples=(9,), dropout=0.3, trainer=trainer | {"logger": "list"})
    results = pools.run(2, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    losses, steps = (
        [[value[at] for value in result["records"] if "val_loss" in value[1]] for result in (results[0], plain)]
        for at in (1, 0)
    )
    assert steps[0] == steps[1] == [step - 1 for step in validated]
    batches = list(mini_batches_of(run, trainer["max_epochs"]))
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, batches)[0])
    for step, metrics in zip(validated, losses[0]):
        assert metrics["val_loss"] == pytest.approx(loss_after(run, batches[:step], 9), rel=1e-5)
