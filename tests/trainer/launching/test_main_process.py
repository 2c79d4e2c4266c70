"""start_method="fork" and "spawn": the process that starts the ranks has afterwards what they trained, all of it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_asyncpp import PipelineModule
from tests.helpers.cases import DIM
from tests.helpers.modules import EMA, HasAverage
from tests.helpers.modules import SECOND_NAMES_RUN as SECOND_NAMES
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Net, Run, arrays, fit, loader, val_loaders
from tests.trainer.launching.main_process import fit_from_outside, run, starting
from tests.trainer.launching.test_several_trainers import RUN as SEVERAL
from tests.trainer.launching.test_several_trainers import train_twice_and_validate

PLAIN = Run(Net, options={"microbatches": 4}, samples=24, val_samples=(16,), trainer={"enable_checkpointing": True})


class Lazy(PipelineModule, Net):
    """Built on the meta device, by the ranks; what a buffer outside of the state_dict holds, its layer knows."""

    def __init__(self, run: Run) -> None:
        Net.__init__(self, run)
        self.model = None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), Shift(), nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 1))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.empty(DIM), persistent=False)

    def reset_parameters(self) -> None:
        self.by.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


CASES: dict[str, tuple[Run, int]] = {
    "two stages": (PLAIN, 2),
    "three stages, second names, buffers": (SECOND_NAMES, 3),
    "built by the ranks": (replace(PLAIN, module=Lazy), 3),
}
SLOW: dict[str, tuple[Run, int]] = {
    "an average in the module": (replace(PLAIN, module=HasAverage), 2),
    "two replicas": (replace(SECOND_NAMES, options={"microbatches": 4, "data_parallel_size": 2}), 4),
    "a callback that averages": (replace(PLAIN, callbacks=EMA), 2),
    "sharded checkpoints": (replace(PLAIN, options=PLAIN.options | {"state_dict_type": "sharded"}), 2),
    "versions in bf16": (
        replace(PLAIN, options=PLAIN.options | {"weight_dtype": "bf16"},
                trainer=PLAIN.trainer | {"precision": "bf16-mixed"}), 3,
    ),
}  # fmt: skip
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW or name == "two stages" else [])
    for name in CASES | SLOW
]


def check(pools: Pools, of: Run, devices: int, folder: Path, method: str = "fork", timeout: float = 40.0) -> None:
    """The same training by ranks that stay says what is right."""
    of = replace(of, callbacks=(*of.callbacks, saving(folder / "kept")))
    expected = pools.run(devices, fit, of)[0]
    found = run(fit_from_outside, replace(of, callbacks=(*of.callbacks[:-1], saving(folder / "own"))), devices, method,
                timeout=timeout)  # fmt: skip
    assert_equal_weights(found["state"], expected["full_afterwards"])
    assert_equal_weights(found["full"], found["state"])
    assert found["callback_metrics"] == expected["callback_metrics"]
    assert Path(found["best"]).relative_to(folder / "own") == Path(expected["best"]).relative_to(folder / "kept")
    if "sharded" not in of.options.values():
        saved = torch.load(found["best"], weights_only=True)["state_dict"]
        assert_equal_weights(found["state"], arrays(saved))


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_starting_process_has_the_trained_model(pools: Pools, case: str, tmp_path: Path) -> None:
    check(pools, *(CASES | SLOW)[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["two stages", "built by the ranks", "two replicas"])
def test_spawned_ranks_give_it_back_alike(pools: Pools, case: str, tmp_path: Path) -> None:
    check(pools, *(CASES | SLOW)[case], tmp_path, "spawn", timeout=200.0)


def live_on() -> dict[str, Any]:
    """What follows a fit in a notebook, with the same module: a validation, another fit, another Trainer."""
    L.seed_everything(SEVERAL.seed, verbose=False)
    module = SEVERAL.module(SEVERAL)
    first = starting(SEVERAL, 2, enable_checkpointing=True)
    first.fit(module, loader(SEVERAL))
    errors = []
    for again in (lambda: first.fit(module, loader(SEVERAL)), lambda: first.save_checkpoint("never.ckpt")):
        try:
            again()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    starting(SEVERAL, 3).fit(module, loader(SEVERAL))
    evaluated = starting(SEVERAL, 2)
    losses = evaluated.validate(module, val_loaders(SEVERAL), verbose=False)
    tested = evaluated.test(module, val_loaders(SEVERAL), verbose=False)
    predicted = evaluated.predict(module, val_loaders(SEVERAL))
    return {
        "errors": errors, "weights": arrays(module.state_dict()), "losses": losses, "tested": tested,
        "predicted": predicted,
    }  # fmt: skip


def test_what_follows_goes_on_from_the_trained_model(pools: Pools) -> None:
    """On another number of stages, too: the module was never cut."""
    expected = pools.run(1, train_twice_and_validate, SEVERAL)[0]
    found = run(live_on)
    assert_equal_weights(found["weights"], expected["weights"])
    assert found["losses"] == expected["losses"]
    assert found["tested"][0]["test_loss"] == expected["losses"][0]["val_loss"]
    assert found["predicted"] is None, "as in Lightning with processes that are forked"
    assert "NotImplementedError: Calling `trainer.fit()` twice" in found["errors"][0]
    assert "ConfigurationError: start_method='fork': this process started those that train" in found["errors"][1]


class Fails(Net):
    """Raises, or is killed, on one rank."""

    how, on_rank = "", -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 or self.trainer.global_rank != self.on_rank:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the user's own mistake")


def fail_and_mend(how: str, on_rank: int) -> tuple[str, dict[str, np.ndarray]]:
    """The error that a cell of a notebook shows, and the model after the same Trainer ran again."""
    L.seed_everything(PLAIN.seed, verbose=False)
    module, trainer = Fails(PLAIN), starting(PLAIN, 3, enable_checkpointing=False)
    module.how, module.on_rank = how, on_rank
    before = arrays({name: tensor.clone() for name, tensor in module.state_dict().items()})
    try:
        trainer.fit(module, loader(PLAIN), val_loaders(PLAIN))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert_equal_weights(arrays(module.state_dict()), before)
    module.on_rank = -1
    trainer.fit(module, loader(PLAIN), val_loaders(PLAIN))
    return said, arrays(module.state_dict())


@pytest.mark.parametrize(
    ("how", "on_rank"),
    [
        ("raise", 2),
        pytest.param("raise", 1, marks=pytest.mark.slow),
        pytest.param("raise", 0, marks=pytest.mark.slow),
        pytest.param("kill", 1, marks=pytest.mark.slow),
    ],
)
def test_a_failure_of_a_rank_reaches_the_starting_process(pools: Pools, how: str, on_rank: int) -> None:
    expected = pools.run(3, fit, replace(PLAIN, trainer={}))[0]["full_afterwards"]
    said, weights = run(fail_and_mend, how, on_rank)
    told = ("ValueError: the user's own mistake",) if how == "raise" else ("SIGKILL", "rank 1 (stage 1) is gone")
    assert any(text in said for text in told), said
    assert_equal_weights(weights, expected)
