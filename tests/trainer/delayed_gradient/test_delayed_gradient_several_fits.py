"""Emulated delays in a Trainer that is used several times, and weights that others than the optimizer move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError
from tests.trainer.delayed_gradient.delays import Branches, delayed, train
from tests.trainer.runs import Net, Run, Watch, loader, make_trainer


def fresh_module(run: Run, scale: float = 1.0) -> Net:
    torch.manual_seed(0)
    module = Net(run)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(scale)
    return module


def fitted(trainer: L.Trainer, module: Net, checkpoint: Path | None = None) -> list[float]:
    """The loss of every batch of a training with ``trainer``."""
    watch = next(c for c in trainer.callbacks if isinstance(c, Watch))  # type: ignore[attr-defined]
    watch.losses.clear()
    trainer.fit(module, loader(module.run), ckpt_path=checkpoint)
    return list(watch.losses)


def trained_and_saved(path: Path, run: Run) -> L.Trainer:
    trainer = make_trainer(run)
    fitted(trainer, fresh_module(run))
    trainer.save_checkpoint(path)
    return trainer


@pytest.mark.parametrize("options", [{"delay": 1}, {"delay": 2}, {"delay": 1, "micro_batches": 2}], ids=str)
def test_the_same_trainer_resumes_as_a_new_one(options: dict[str, Any], tmp_path: Path) -> None:
    run = Run(Net, "delayed", options)
    trainer = trained_and_saved(tmp_path / "a.ckpt", run)
    anew = fitted(make_trainer(run, max_epochs=2), fresh_module(run), tmp_path / "a.ckpt")
    trainer.fit_loop.max_epochs = 2
    assert fitted(trainer, fresh_module(run), tmp_path / "a.ckpt") == anew
    assert len(anew) == 5


def test_a_checkpoint_that_was_evaluated_leaves_nothing_for_the_next_training(tmp_path: Path) -> None:
    run = Run(Net, "delayed", {"delay": 1})
    trained_and_saved(tmp_path / "a.ckpt", run)
    alone = fitted(make_trainer(run), fresh_module(run, scale=0.5))
    trainer = make_trainer(run)
    trainer.test(fresh_module(run), loader(run), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert fitted(trainer, fresh_module(run, scale=0.5)) == alone


def test_a_checkpoint_of_weights_alone_holds_one_version(tmp_path: Path) -> None:
    trainer = trained_and_saved(tmp_path / "a.ckpt", Run(Net, "delayed", {"delay": 2}))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "delayed_gradient" in torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert "delayed_gradient" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


class Teaches(Branches):
    """A frozen copy, which the optimizer holds as well, follows a layer in every step."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.followed: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(torch.full((4, 4), float(batch_idx)), 0.5)
        self.followed.append(self.teacher.weight.detach().clone())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{"delay": 2}, {"delay": 1, "micro_batches": 1}], ids=str)
def test_frozen_weights_move_as_the_step_moves_them(options: dict[str, Any]) -> None:
    run = Run(Teaches, "delayed", options)
    moved = [_teacher_after(one) for one in (run, replace(run, strategy="plain"))]
    assert torch.equal(moved[0], moved[1])


def _teacher_after(run: Run) -> Tensor:
    torch.manual_seed(0)
    module = Teaches(run)
    make_trainer(run).fit(module, loader(run))
    assert torch.equal(module.teacher.weight, module.followed[-1])
    return module.teacher.weight.detach()


class Renormalises(Branches):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        with torch.no_grad():
            self.mix.weight.div_(self.mix.weight.norm())
        return super().training_step(batch, batch_idx)


def test_a_step_that_writes_into_trained_weights_is_refused_under_a_delay() -> None:
    run = Run(Renormalises, "delayed")
    train(delayed(run, delay=0))
    with pytest.raises(ConfigurationError, match=r"mix.weight: changed in place .* change weights in on_train_batch_"):
        train(delayed(run, delay=1))


@pytest.mark.parametrize("micro_batches", [None, 1])
def test_the_extra_pass_of_weight_averaging_runs_on_the_averaged_weights(micro_batches: int | None) -> None:
    """Statistics of batch norm after it are those of a forward over the training set with the final weights."""
    run = Run(
        Branches, "delayed", {"delay": 2, "micro_batches": micro_batches}, samples=16, batch_size=16,
        trainer={"max_epochs": 4}, callbacks=((StochasticWeightAveraging, {"swa_lrs": 0.05, "swa_epoch_start": 2}),),
    )  # fmt: skip
    trained = train(run)
    module = Branches(run)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in trained["weights"].items()}, strict=False)
    x = loader(run).dataset.x
    mean = module.convolution[0](x.unsqueeze(1)).mean((0, 2))
    np.testing.assert_allclose(trained["buffers"]["convolution.1.running_mean"], mean.detach(), rtol=1e-4, atol=1e-6)
