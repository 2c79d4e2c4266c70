"""A checkpoint holds the whole model, also if saved after training, and is refused for another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_parts, plain_module
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS, RESUMABLE_RUN, saving
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer


def save_afterwards(run: Run, path: str) -> dict[str, Any]:
    """Call ``trainer.save_checkpoint`` after ``fit``, as scripts do, and fit again with the same Trainer."""
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
    """The checkpoint contains no code, but the weights of the whole model in the order of the plain module."""
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
    """Model with two more layers."""

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
