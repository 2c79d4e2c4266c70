"""Checkpoints: what they hold, and a run that goes on as if it had never been interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_parts, joined_weights, plain_module
from tests.helpers.pool import Pools
from tests.helpers.resumable import RESUMABLE_RUN, RESUMABLE_TRAINER, ResumableNet, saving
from tests.helpers.trainer import Net, Run, arrays, fit


@pytest.mark.parametrize("strategy", ["default", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_resumed_at_an_epochs_end(pools: Pools, stages: int, strategy: str, tmp_path: Path) -> None:
    callbacks = (saving(tmp_path, every_n_epochs=1, save_on_train_epoch_end=True),)
    run = replace(RESUMABLE_RUN, strategy=strategy, shuffle=True, callbacks=callbacks, trainer=RESUMABLE_TRAINER)
    whole = pools.run(stages, fit, run)
    resumed = pools.run(stages, fit, replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=5.ckpt")))
    assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
    assert resumed[0]["global_step"] == whole[0]["global_step"] == 15
    assert resumed[0]["rates"] == whole[0]["rates"][5:]
    losses = [(step, m["train_loss_step"]) for step, m in whole[0]["records"] if "train_loss_step" in m]
    assert [(step, m["train_loss_step"]) for step, m in resumed[0]["records"] if "train_loss_step" in m] == losses[5:]


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),  # by default in test_exact_resume.py
        (3, {"staleness": "least"}),
        pytest.param(3, {"staleness": "least", "slack": "exact"}, marks=pytest.mark.slow),
        pytest.param(2, {"staleness": "least", "slack": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_resumed_in_mid_epoch(pools: Pools, stages: int, every: int, options: dict[str, Any], tmp_path: Path) -> None:
    """The mini-batch after the checkpoint runs on the older weights, which the checkpoint holds too."""
    run = replace(
        RESUMABLE_RUN,
        options=options,
        module=ResumableNet,
        callbacks=(saving(tmp_path, every_n_train_steps=every),),
        trainer=RESUMABLE_TRAINER,
    )
    whole = pools.run(stages, fit, run)
    for step in (3, 9):
        resumed = pools.run(stages, fit, replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={step}.ckpt")))
        assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
        assert resumed[0]["steps"] == list(range(step + 1, 16))


def test_resumed_before_validation(pools: Pools, tmp_path: Path) -> None:
    """Saved by validation in mid-epoch, on its metric."""
    callbacks = (saving(tmp_path, monitor="val_loss"),)
    run = replace(
        RESUMABLE_RUN,
        module=ResumableNet,
        callbacks=callbacks,
        val_samples=(9,),
        trainer=RESUMABLE_TRAINER | {"val_check_interval": 2},
    )
    whole = pools.run(2, fit, run)
    resumed = pools.run(2, fit, replace(run, ckpt_path=str(tmp_path / "step=7.ckpt")))
    assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


def test_contents(pools: Pools, tmp_path: Path) -> None:
    """No code in it; the weights are the whole model's, in the order of the plain module."""
    run = replace(
        RESUMABLE_RUN, callbacks=(saving(tmp_path, save_last=True),), trainer=RESUMABLE_TRAINER | {"max_epochs": 1}
    )
    results = pools.run(3, fit, run)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_equal_weights(arrays(checkpoint["state_dict"]), joined_weights(results, 3))
    module = plain_module(run, arrays(checkpoint["state_dict"]))
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    assert {"num_stages": 3, "delay": 1, "microbatches": 3}.items() <= checkpoint["pipeline"].items()
    names = [name for name, _ in module.named_parameters()]
    assert sorted(checkpoint["pipeline"]["older_weights"]) == sorted(n.removeprefix("model.") for n in names)
    assert len(checkpoint["optimizer_states"]) == 1


def save_afterwards(run: Run, path: str) -> dict[str, Any]:
    """``trainer.save_checkpoint`` after ``fit``, as scripts do, and a second run on the same Trainer."""
    from tests.helpers.trainer import loader, make_trainer

    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run))
    trainer.save_checkpoint(path)
    weights = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}
    trainer.validate(module, loader(run), verbose=False)
    trainer.save_checkpoint(path + ".validated")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(run))
    return {"weights": weights, "step": trainer.global_step}


def test_saved_after_the_end(pools: Pools, tmp_path: Path) -> None:
    results = pools.run(
        3, save_afterwards, replace(RESUMABLE_RUN, trainer={"max_epochs": 1}), str(tmp_path / "end.ckpt")
    )
    for name in ("end.ckpt", "end.ckpt.validated"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert_equal_weights(arrays(checkpoint["state_dict"]), joined_parts([result["weights"] for result in results]))
    whole = pools.run(3, fit, replace(RESUMABLE_RUN, trainer={"max_epochs": 2}))
    ckpt_path = str(tmp_path / "end.ckpt")
    resumed = pools.run(3, fit, replace(RESUMABLE_RUN, trainer={"max_epochs": 2}, ckpt_path=ckpt_path))
    assert_equal_weights(joined_weights(resumed, 3), joined_weights(whole, 3))
    assert {result["step"] for result in results} == {10}


class Longer(Net):
    """Two layers more."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layers = list(self.model)  # type: ignore[call-overload]
        self.model = nn.Sequential(*layers[:-1], nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), layers[-1])


@pytest.mark.parametrize(("saved", "loaded"), [(Longer, Net), (Net, Longer)])
def test_the_checkpoint_of_another_model_is_refused_on_every_rank(
    pools: Pools, saved: Any, loaded: Any, tmp_path: Path
) -> None:
    run = Run(saved, callbacks=(saving(tmp_path),), trainer={"enable_checkpointing": True})
    pools.run(2, fit, run)
    path = str(next(tmp_path.glob("*.ckpt")))
    outcomes = pools.outcomes(2, fit, Run(loaded, ckpt_path=path))
    assert all(outcome.error for outcome in outcomes)
    texts = ["unexpected ["] if saved is Longer else ["missing [", "size mismatch for model"]
    assert any(text in outcome.message for text in texts for outcome in outcomes), outcomes
