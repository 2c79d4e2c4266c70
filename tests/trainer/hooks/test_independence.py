"""A training gives the same results for every number of stages, whatever the process did before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest

from tests.helpers.evaluations import Evaluations, fabric_batches, trainer_batches, trajectory
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, loader, make_trainer, staged

RUN = Run(Net, options={"microbatches": 4}, samples=48, batch_size=12, shuffle=True, trainer={"max_epochs": 2})
READING = {
    "a shuffling sampler": Evaluations(drawing=False, drawn_before=True),
    "torch's own shuffling, and noise": Evaluations(shuffled=True, drawn_before=True),
}


@pytest.mark.parametrize("name", READING)
def test_neither_stages_nor_the_past_of_the_process_matter(pools: Pools, name: str) -> None:
    fresh = replace(READING[name], drawn_before=False)
    expected = trajectory(staged(RUN, 1), None, fresh)
    assert len(set(expected["batches"])) >= 16, "microbatches differ, and each is seen"
    last, middle, first = pools.run(3, trajectory, RUN, None, READING[name])
    assert (middle["batches"], first["batches"]) == ([], expected["batches"])
    assert_equal_weights(joined_parts([rank["weights"] for rank in (last, middle, first)]), expected["weights"])
    for what in ("losses", "epochs", "counted", "batches"):
        assert last[what] == expected[what], what


@pytest.mark.parametrize(
    "plan", [READING["a shuffling sampler"], Evaluations(workers=2, shuffled=True)], ids=["sampler", "noisy workers"]
)
def test_fabric_reads_what_the_trainer_reads(pools: Pools, plan: Evaluations) -> None:
    plan = replace(plan, drawn_before=False)
    expected = trainer_batches(staged(RUN, 1), plan)
    assert len(expected) == 8
    assert pools.run(2, fabric_batches, RUN, plan, timeout=200.0) == [expected] * 2


class Doubles(L.LightningDataModule):
    """Data module whose hook unpacks batches, which a stage in the middle does not have."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def train_dataloader(self) -> Any:
        return loader(self.run)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": 2 * batch["x"]}


def fit_prepared(run: Run) -> dict[str, Any]:
    """Train with the data module, and return the weights of all stages."""
    L.seed_everything(run.seed, verbose=False)
    trainer, data = make_trainer(run), Doubles(run)
    trainer.fit(Net(run), datamodule=data)
    assert not [name for name in vars(data) if name.startswith("on_")], "hooks were not given back"
    return arrays(trainer.strategy.full_state_dict())


def test_a_data_modules_hooks_are_called_and_given_back(pools: Pools) -> None:
    run = Run(Net, "default", {"microbatches": 3})
    assert_equal_weights(pools.run(3, fit_prepared, run)[0], fit_prepared(staged(run)))
