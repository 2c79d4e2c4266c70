"""What users do around an update: it means what it means in one process, or ends the run on every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools, impatient
from tests.helpers.projections import parameters_of
from tests.helpers.trainer import Net, Run, fit, loader, make_trainer, report, staged, train, val_loaders
from tests.trainer.idioms.optimization import EverySecondBatch

LEAST = {"microbatches": 4, "partition": "uniform"}


class Counts(Net):
    """What hooks around an update see: a name, the step, the epoch, the learning rate."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen: list[tuple[str, int, int, float]] = []

    def see(self, name: str) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((name, self.trainer.global_step, self.current_epoch, round(rate, 6)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see("before step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.see("clipping")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(f"end of {batch_idx}")

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["optimizer"].register_step_pre_hook(lambda *_: self.see("pre hook"))
        made["optimizer"].register_step_post_hook(lambda *_: self.see("post hook"))
        return made


def fit_seen(run: Run) -> list[tuple[str, int, int, float]]:
    L.seed_everything(run.seed, verbose=False)
    module = Counts(run)
    make_trainer(run).fit(module, loader(run), val_loaders(run))
    return module.seen


def test_hooks_of_an_update_see_the_step_of_its_batch(pools: Pools) -> None:
    run = Run(Counts, options={"microbatches": 3}, scheduler="decay-step", val_samples=(9,))
    run = replace(run, trainer={"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": 2})
    expected = fit_seen(staged(run, 1))
    assert pools.run(3, fit_seen, run) == [expected] * 3


class ClipsBySchedule(Net):
    """The limit of a batch is set when it begins, and must not reach the update of the batch before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.gradient_clip_val = 0.02 * 0.5**batch_idx


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_a_batch_is_clipped_by_its_own_limit(pools: Pools, algorithm: str) -> None:
    """The limit is certain where the pipeline drains after the batch."""
    run = Run(ClipsBySchedule, "default", LEAST, {"gradient_clip_algorithm": algorithm}, optimizer="sgd")
    drained = replace(run, val_samples=(8,), trainer=run.trainer | {"val_check_interval": 1})
    expected = train(staged(drained))["weights"]
    assert_equal_weights(train(staged(run))["weights"], expected)
    assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), expected)


class NoisyGradients(Net):
    """Trains on noise alone, and draws before gradients are zeroed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.drawn: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.drawn += [float(torch.rand(())), random.random(), float(np.random.random())]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.randn_like(parameter) * (1 + 0.1 * random.random() + 0.1 * np.random.random())


def fit_noisy(run: Run) -> dict[str, Any]:
    L.seed_everything(run.seed, verbose=False)
    module, trainer = NoisyGradients(run), make_trainer(run)
    trainer.fit(module, loader(run), val_loaders(run))
    return report(trainer, module) | {"drawn": module.drawn, "next": torch.rand(()).item()}


def test_noise_of_an_update_is_that_of_the_stage_and_the_update(pools: Pools) -> None:
    run = Run(NoisyGradients, "default", LEAST, optimizer="sgd", val_samples=(8,))
    expected = fit_noisy(staged(run, 2))
    last, first = pools.run(2, fit_noisy, replace(run, trainer={"val_check_interval": 2}))
    assert_equal_weights(joined_weights([last, first], 2), expected["weights"])
    assert not set(last["drawn"]) & set(first["drawn"]), "two stages drew the same"
    assert len(set(last["drawn"])) == len(last["drawn"]), "two batches drew the same"
    assert last["next"] == first["next"], "the process's generators were not put back"


class LooksAtItsLoss(Net):
    """Writes down the losses that it is given; ``limit`` or ``always`` make it decide by them whether to step."""

    limit: float | None = None
    always = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.given: list[Any] = []

    def on_before_backward(self, loss: Any) -> None:
        self.given.append(loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.given.append(outputs.get("loss"))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        loss = optimizer_closure()
        self.given.append(loss)
        if self.always and (self.limit is None or float(loss) < self.limit):
            optimizer.step()


class Decides(LooksAtItsLoss):
    limit = 1e6


class DecidesWithoutOne(LooksAtItsLoss):
    """Ranks that do not know the loss take part in no update."""

    @property
    def always(self) -> bool:  # type: ignore[override]
        return self.given[-1] is not None


def fit_looking(run: Run) -> list[bool]:
    module = run.module(run)
    make_trainer(run).fit(module, loader(run))
    return [given is None for given in module.given]  # type: ignore[attr-defined]


def test_a_loss_that_a_rank_does_not_know_is_none(pools: Pools) -> None:
    last, first = pools.run(2, fit_looking, Run(LooksAtItsLoss, options={"microbatches": 2}, samples=24))
    assert last == [False] * 9
    assert first == [True] * 9


@pytest.mark.parametrize(
    ("module", "errors"),
    [(Decides, {"PeerLostError", "TypeError"}), (DecidesWithoutOne, {"ProtocolError", "PeerLostError"})],
)
def test_ranks_that_decide_differently_end_at_once(pools: Pools, module: type[Net], errors: set[str]) -> None:
    outcomes = pools.outcomes(2, impatient, fit_looking, Run(module, options={"microbatches": 2}))
    assert {outcome.error for outcome in outcomes} == errors


def test_a_batch_without_a_step_is_dropped_as_in_a_single_process() -> None:
    plain = train(Run(EverySecondBatch, "plain"))
    for name, weights in train(Run(EverySecondBatch, "delayed", {"delay": 0, "microbatches": 1}))["weights"].items():
        assert plain["weights"][name] == pytest.approx(weights, abs=1e-6)
