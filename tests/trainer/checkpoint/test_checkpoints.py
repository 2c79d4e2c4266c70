"""What checkpoints hold, and when they are taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_parts, mini_batches_of, oracle, plain_module
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS, RESUMABLE_RUN, saving
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer, report, val_loaders


def save_afterwards(run: Run, path: str) -> dict[str, Any]:
    """``trainer.save_checkpoint`` after ``fit``, as scripts do, and a second run on the same Trainer."""
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
    """No code in it; the weights are the whole model's, in the order of the plain module."""
    run, path = replace(RESUMABLE_RUN, trainer={"max_epochs": 1}), tmp_path / "end.ckpt"
    results = pools.run(3, save_afterwards, run, str(path))
    for name in ("end.ckpt.validated", "end.ckpt"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert_equal_weights(arrays(checkpoint["state_dict"]), joined_parts([result["weights"] for result in results]))
    module = plain_module(run, arrays(checkpoint["state_dict"]))
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    assert {"num_stages": 3, "delay": 1, "microbatches": 3}.items() <= checkpoint["pipeline"].items()
    names = [name for name, _ in module.named_parameters()]
    assert sorted(checkpoint["pipeline"]["older_weights"]) == sorted(n.removeprefix("model.") for n in names)
    run = replace(run, trainer={"max_epochs": 2})
    (whole,), (resumed,) = (ONE_PROCESS.run(3, fit, replace(run, ckpt_path=p)) for p in (None, str(path)))
    assert_equal_weights(resumed["weights"], whole["weights"])
    assert {result["step"] for result in results} == {10}


class Longer(Net):
    """Two layers more."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layers = list(self.model)  # type: ignore[call-overload]
        self.model = nn.Sequential(*layers[:-1], nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), layers[-1])


def test_the_checkpoint_of_another_model_is_refused_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    run = Run(Net, callbacks=(saving(tmp_path, filename="saved"),), trainer={"enable_checkpointing": True})
    ONE_PROCESS.run(2, fit, run)
    outcomes = pools.outcomes(2, fit, Run(Longer, ckpt_path=str(tmp_path / "saved.ckpt")))
    assert all(outcome.error for outcome in outcomes)
    assert any("size mismatch for model" in outcome.message for outcome in outcomes), outcomes


def test_resumed_from_last(tmp_path: Path) -> None:
    """Another Trainer with the same ModelCheckpoint finds the newest file by itself, and goes on as if nothing was."""
    run = Run(Net, dropout=0.2, scheduler="decay-step", shuffle=True)
    (whole,) = ONE_PROCESS.run(2, fit, replace(run, trainer={"max_epochs": 3}))
    run = replace(run, callbacks=(saving(tmp_path, save_top_k=1, save_last=True),), ckpt_path="last")
    for epochs, first in ((1, 1), (3, 6)):
        trainer = {"max_epochs": epochs, "enable_checkpointing": True}
        (resumed,) = ONE_PROCESS.run(2, fit, replace(run, trainer=trainer))
        assert resumed["steps"][0] == first
    assert_equal_weights(resumed["weights"], whole["weights"])


def fit_and_return_to_the_best(run: Run) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """What ``validate(ckpt_path="best")`` after ``fit`` measured and left, and more training from the best."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run), val_loaders(run))
    (validated,) = trainer.validate(module, val_loaders(run), ckpt_path="best", verbose=False)
    best = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}
    score = float(trainer.checkpoint_callback.best_model_score)  # type: ignore[union-attr]
    trainer.fit(module, loader(run), val_loaders(run), ckpt_path="best", weights_only=True)
    return best, report(trainer, module), [validated["val_loss"], score]


def test_back_to_the_best(pools: Pools, tmp_path: Path) -> None:
    """The best is the first of three epochs: the targets are noise."""
    run = Run(Net, callbacks=(saving(tmp_path, save_top_k=1, monitor="val_loss"),), val_samples=(8,))
    run = replace(run, trainer={"max_epochs": 3, "enable_checkpointing": True})
    best, reports, losses = zip(*pools.run(2, fit_and_return_to_the_best, run))
    for parts, epochs in ((best, 1), ([after["weights"] for after in reports], 3)):
        assert_equal_weights(joined_parts(parts), oracle(run, 2, list(mini_batches_of(run, epochs)))[0])
    for after, (validated, score) in zip(reports, losses):
        assert Path(after["best"]).name == "step=5.ckpt"
        assert validated == pytest.approx(score, rel=1e-6)
        assert after["steps"] == [*range(1, 16), *range(6, 16)]
