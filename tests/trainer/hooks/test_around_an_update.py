"""What users do around an update: it means what it means under ``delayed_gradient``, or is refused on every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.projections import Changing, Projected, PutsOtherMemory, project
from tests.helpers.trainer import Net, Run, delayed, fit, loader, make_trainer, report, train, val_loaders


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Those that it steps: where one process runs all stages, the module has those of the others, too."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ProjectsInTheStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda stepped, *_: project(parameters_of(stepped)))
        return optimizer


class ProjectsBeforeValidating(Net):
    def on_validation_start(self) -> None:
        if self.trainer.training or self.trainer.validating:
            project(self.parameters())


CASES: dict[str, tuple[type[Net], int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # module, stages, of the run, of the Trainer, of both strategies
    "feedback": (Projected, 2, {"correction": "feedback"}, {"gradient_clip_val": 0.4}, {}),
    "prediction": (Projected, 3, {"correction": "prediction-ahead"}, {"accumulate_grad_batches": 2}, {}),
    "other memory": (PutsOtherMemory, 2, {}, {"accumulate_grad_batches": 2}, {}),
    "after the step": (ProjectsInTheStep, 3, {"correction": "feedback"}, {}, {}),
    "before a validation": (ProjectsBeforeValidating, 2, {}, {}, {}),
}


@pytest.mark.parametrize("intervals", [(2, 5), pytest.param((1, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    # The first two are in test_between_accumulated_batches.py, too; and a prediction is a correction as feedback is.
    [pytest.param(n, marks=pytest.mark.slow) if n in ("other memory", "prediction") else n for n in CASES],
)
def test_changed_weights_are_those_of_one_process_whenever_it_validates(
    pools: Pools, name: str, intervals: tuple[int, ...]
) -> None:
    module, stages, of_run, trainer, options = CASES[name]
    run = Run(module, "async", {"microbatches": 3} | options, dropout=0.2, val_samples=(9,), **of_run)
    for interval in intervals[-1:] if name == "before a validation" else intervals:
        run = replace(run, trainer={"max_epochs": 2, "val_check_interval": interval} | trainer)
        emulated = train(delayed(run, delay=1, microbatches=3, **options))
        assert_equal_weights(joined_weights(pools.run(stages, fit, run), stages), emulated["weights"])


@pytest.mark.parametrize("module", [Projected, pytest.param(ProjectsInTheStep, marks=pytest.mark.slow)])
def test_changed_weights_where_stages_step_ahead(pools: Pools, module: type[Net]) -> None:
    run = Run(module, "async", {"microbatches": 3, "staleness": "least", "partition": "uniform"})
    run = replace(run, trainer={"max_epochs": 2})
    emulated = train(delayed(run, staleness="least", stages=2, microbatches=3, partition="uniform"))
    assert_equal_weights(joined_weights(pools.run(2, fit, run), 2), emulated["weights"])


class Saves(Changing):
    def change(self, batch_idx: int) -> None:
        self.trainer.strategy.full_state_dict()  # type: ignore[attr-defined]


def test_who_gathers_between_two_updates_is_refused(pools: Pools) -> None:
    for outcome in pools.outcomes(2, fit, Run(Saves, options={"microbatches": 2})):
        assert outcome.error == "ConfigurationError"
        assert "in the middle of the next batch" in outcome.message


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


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hooks_of_an_update_see_the_step_of_its_batch(pools: Pools, accumulate: int) -> None:
    run = Run(Counts, "async", {"microbatches": 3}, scheduler="decay-step", val_samples=(9,))
    run = replace(run, trainer={"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": accumulate})
    expected = fit_seen(delayed(run, delay=1, microbatches=3))
    for seen in pools.run(3, fit_seen, run):
        assert seen == expected


class ClipsBySchedule(Net):
    """The limit of a batch is set when it begins, and must not reach the update of the batch before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.gradient_clip_val = 0.02 * 0.5**batch_idx


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_a_batch_is_clipped_by_its_own_limit(pools: Pools, algorithm: str) -> None:
    options = {"microbatches": 4, "partition": "uniform", "staleness": "least"}
    run = Run(ClipsBySchedule, options=options, optimizer="sgd", samples=64)
    run = replace(run, trainer={"gradient_clip_algorithm": algorithm, "max_epochs": 1})
    expected = train(delayed(run, stages=3, **options))["weights"]
    for interval in (1.0, 2):
        drained = replace(run, val_samples=(8,), trainer=run.trainer | {"val_check_interval": interval})
        assert_equal_weights(joined_weights(pools.run(3, fit, drained), 3), expected)


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
    options = {"microbatches": 4, "partition": "uniform", "staleness": "least"}
    run = Run(NoisyGradients, options=options, optimizer="sgd", val_samples=(8,))
    expected = fit_noisy(delayed(run, stages=2, **options))
    results = pools.run(2, fit_noisy, replace(run, trainer={"val_check_interval": 2}))
    assert_equal_weights(joined_weights(results, 2), expected["weights"])
    assert not set(results[0]["drawn"]) & set(results[1]["drawn"]), "two stages drew the same"
    assert len(set(results[0]["drawn"])) == len(results[0]["drawn"]), "two batches drew the same"
    assert results[0]["next"] == results[1]["next"], "the process's generators were not put back"


class LooksAtItsLoss(Net):
    """Decides on the loss of the batch whether to step; others write down what they are given."""

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
        if self.decides and float(loss) > 1e6:
            return
        optimizer.step()

    decides = False


class Decides(LooksAtItsLoss):
    decides = True


class DecidesWithoutOne(LooksAtItsLoss):
    """Ranks that do not know the loss take part in every update, or in none."""

    always = True

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        loss = optimizer_closure()
        if self.always if loss is None else (batch_idx != 1) == self.always:
            optimizer.step()


class NeverDecidesWithoutOne(DecidesWithoutOne):
    always = False


def fit_looking(run: Run) -> list[bool]:
    module = run.module(run)
    make_trainer(run).fit(module, loader(run))
    return [given is None for given in module.given]  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_loss_that_a_rank_does_not_know_is_none(pools: Pools, strategy: str) -> None:
    run = Run(LooksAtItsLoss, strategy, {"microbatches": 2}, samples=24)
    last, first = pools.run(2, fit_looking, run)
    assert last == [False] * 9
    assert first == [True] * 9


def test_a_decision_on_such_a_loss_ends_the_run_at_once(pools: Pools) -> None:
    outcomes = pools.outcomes(2, fit_looking, Run(Decides, options={"microbatches": 2}), timeout=30.0)
    assert [outcome.error for outcome in outcomes] == ["PeerLostError", "TypeError"]


@pytest.mark.parametrize("module", [DecidesWithoutOne, NeverDecidesWithoutOne])
@pytest.mark.parametrize("strategy", ["default", "sync"])
def test_ranks_that_decide_differently_end_at_once(pools: Pools, strategy: str, module: type[Net]) -> None:
    outcomes = pools.outcomes(2, fit_looking, Run(module, strategy, {"microbatches": 2}), timeout=30.0)
    assert {outcome.error for outcome in outcomes} == {"ProtocolError", "PeerLostError"}
    assert any("ranks are in different calls" in outcome.message for outcome in outcomes)


class StepsSometimes(Net):
    """Lightning's page on optimizers: to step at arbitrary intervals."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if batch_idx % 3 == 1:
            optimizer.step()


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_batch_without_a_step_belongs_to_no_update(pools: Pools, strategy: str) -> None:
    run = Run(StepsSometimes, strategy, {"microbatches": 3}, dropout=0.2, val_samples=(9,))
    run = replace(run, trainer={"max_epochs": 2, "val_check_interval": 3})
    emulated = train(delayed(run, delay=int(strategy == "async"), microbatches=3))
    assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), emulated["weights"])


def test_a_batch_without_a_step_holds_back_as_many_microbatches(pools: Pools) -> None:
    options = {"microbatches": 3, "partition": "uniform"}
    run = Run(StepsSometimes, "async", {**options, "staleness": "least"}, dropout=0.2, trainer={"max_epochs": 2})
    emulated = train(delayed(run, staleness="least", stages=3, **options))
    assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), emulated["weights"])


def test_a_batch_without_a_step_is_dropped_as_in_a_single_process() -> None:
    plain = train(Run(StepsSometimes, "plain"))
    emulated = train(Run(StepsSometimes, "delayed", {"delay": 0, "microbatches": 1}))
    for name, weights in plain["weights"].items():
        assert emulated["weights"][name] == pytest.approx(weights, abs=1e-6)


class ZeroesInPlace(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_zeroing_in_place_changes_nothing(pools: Pools) -> None:
    run = Run(Net, "async", {"microbatches": 2}, trainer={"accumulate_grad_batches": 2})
    expected = train(delayed(run, delay=1, microbatches=2))["weights"]
    run = replace(run, module=ZeroesInPlace)
    assert_equal_weights(train(delayed(run, delay=1, microbatches=2))["weights"], expected)
    assert_equal_weights(joined_weights(pools.run(2, fit, run), 2), expected)


class LogsMetric(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.error: nn.Module = MeanSquaredError()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(batch["x"])
        self.error(output, batch["y"])
        self.log("error", self.error, on_step=True, on_epoch=True, prog_bar=True)  # type: ignore[arg-type]
        return F.mse_loss(output, batch["y"])


def test_a_metric_has_the_names_of_plain_lightning() -> None:
    plain, emulated = (
        train(Run(LogsMetric, strategy, options))
        for strategy, options in (("plain", {}), ("delayed", {"microbatches": 2}))
    )
    assert sorted(plain["callback_metrics"]) == sorted(emulated["callback_metrics"])
    assert [sorted(m) for _, m in plain["records"]] == [sorted(m) for _, m in emulated["records"]]
