"""Several Trainers can run one after the other, as in plain Lightning."""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
from typing import Any

import lightning as L
import numpy as np
import pytest

from lightning_asyncpp.trainer.step_log import EPOCH_ENDS
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer, val_loaders

RUN = Run(Net, optimizer="muon", error_feedback=True, samples=24, val_samples=(16,), options={"microbatches": 3})


class Copies(L.Callback):
    """Callback that keeps a mean of the weights in a copy of the module, as users write it."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.mean = copy.deepcopy(module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for mean, parameter in zip(self.mean.parameters(), module.parameters()):
            mean.data.lerp_(parameter.data, 0.5)


def train_twice_and_validate(run: Run) -> dict[str, Any]:
    """Fit a module twice and validate it, each with a new Trainer; a callback copies the module in the second fit."""
    L.seed_everything(run.seed, verbose=False)
    module, copies = run.module(run), Copies()
    make_trainer(run).fit(module, loader(run))
    second = make_trainer(run, callbacks=[copies])
    second.fit(module, loader(run))
    methods = [getattr(copies.mean, name) for name in ("log", *EPOCH_ENDS)]
    return {
        "weights": arrays(second.strategy.full_state_dict()),
        "losses": make_trainer(run).validate(module, val_loaders(run), verbose=False),
        "mean": arrays(dict(copies.mean.named_parameters())),
        "plain": all(m.__self__ is copies.mean and m.__func__ is getattr(Net, m.__name__) for m in methods),
    }


def test_the_next_trainer_goes_on_where_the_last_one_stopped(pools: Pools) -> None:
    """The next Trainer starts from the last one's weights, and a copy of the module is a plain module."""
    (expected,), ranks = (where.run(3, train_twice_and_validate, RUN) for where in (ONE_PROCESS, pools))
    assert_equal_weights(ranks[0]["weights"], expected["weights"])
    for rank in ranks:
        assert rank["losses"] == expected["losses"]
        assert rank["plain"]
        assert all(not np.array_equal(array, expected["weights"][name]) for name, array in rank["mean"].items())


def left_after_a_run() -> list[int]:
    """Train, and return this rank's numbers of threads and files; a run's process groups end before the next run."""
    fit(Run(Net, "async", {"microbatches": 2}))
    gc.collect()
    time.sleep(0.2)  # a thread is listed until it has really ended
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads and files in /proc")
def test_no_thread_and_no_file_outlives_its_run(pools: Pools) -> None:
    _, before, after = (np.array(pools.run(2, left_after_a_run)) for _ in range(3))
    assert (after <= before).all()
