"""``Trainer.fit`` over the stages of a pipeline ends with the oracle's weights, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from lightning_asyncpp.trainer.gpt_module import learning_rate_factor
from tests.helpers.cases import DIM
from tests.helpers.modules import (
    CarryingNet,
    FrozenStatisticsNet,
    InPlaceNet,
    NoisyNet,
    SummingNet,
    WeighingNet,
    small_gpt,
)
from tests.helpers.oracle import (
    assert_equal_weights,
    batches_of,
    joined_parts,
    joined_weights,
    mini_batches_of,
    oracle,
)
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, delayed, fit, initial_weights, make_scheduler, staged, train

TWO_EPOCHS = {"max_epochs": 2}
CLIPPED = {"gradient_clip_val": 0.4}
UNEVEN = {1: [9], 2: [1, 8], 3: [6, 2, 1], 4: [1, 2, 1, 5]}  # layers of each stage


def adamw(stages: int, strategy: str = "async") -> Run:
    options = {"microbatches": 4, "partition": UNEVEN[stages]}
    return Run(Net, strategy, options, TWO_EPOCHS, scheduler="decay-step")


MUON = Run(Net, trainer=CLIPPED, optimizer="muon", error_feedback=True, scheduler="decay-step", dropout=0.2)
VALIDATED = {"max_epochs": 3, "val_check_interval": 2, "enable_checkpointing": True}
GPT = Run(small_gpt, "async", {"microbatches": 3}, TWO_EPOCHS, dataset="tokens", samples=36)
RUNS: dict[str, tuple[Run, int]] = {
    **{f"adamw-{stages}": (adamw(stages), stages) for stages in UNEVEN},
    "adamw-sync": (adamw(3, "sync"), 3),
    "muon-feedback-clipped": (MUON, 3),
    "muon-feedback-sync": (replace(MUON, strategy="sync"), 4),  # its feedback passes the step through
    "an odd number accumulated": (
        replace(MUON, dropout=0.0, samples=37, trainer={**CLIPPED, **TWO_EPOCHS, "accumulate_grad_batches": 2}), 3,
    ),
    "validated and saved in mid-epoch": (
        Run(Net, samples=52, val_samples=(10,), dropout=0.3, scheduler="decay-step", shuffle=True, trainer=VALIDATED),
        3,
    ),
    "in evaluation mode when it drains": (
        Run(FrozenStatisticsNet, val_samples=(10,), trainer={**TWO_EPOCHS, "val_check_interval": 2}), 2,
    ),
    "max_steps": (Run(Net, samples=45, shuffle=True, trainer={"max_steps": 3, "max_epochs": -1}), 2),
    "limited": (Run(Net, samples=45, shuffle=True, trainer={**TWO_EPOCHS, "limit_train_batches": 4}), 3),
    "scheduled by epoch": (Run(Net, scheduler="decay-epoch", trainer={"max_epochs": 3}, samples=24), 2),
    "layers that change their input": (Run(InPlaceNet, options={"microbatches": 3}), 3),
    "a dictionary over the cuts": (Run(CarryingNet, samples=29, optimizer="muon", error_feedback=True), 3),
    "noise around the model": (Run(NoisyNet, dropout=0.2, trainer=TWO_EPOCHS), 3),
    "weighed": (Run(WeighingNet, samples=39), 3),
    "sums": (Run(SummingNet, samples=39), 3),
    "gpt": (GPT, 2),
}  # fmt: skip
OVER_PROCESSES = {"adamw-3": 3, "an odd number accumulated": 2, "validated and saved in mid-epoch": 3, "gpt": 3}


def after_update(run: Run) -> Callable[[Any], Callable[[], None]] | None:
    """The schedules that the oracle does not know."""
    if run.module is small_gpt:
        return lambda optimizer: LambdaLR(optimizer, learning_rate_factor(small_gpt(run))).step
    if run.scheduler != "decay-epoch":
        return None

    def by_epoch(optimizer: Any) -> Callable[[], None]:
        step, updates = make_scheduler(run, optimizer)["scheduler"].step, itertools.count(1)  # type: ignore[index]
        return lambda: step() if next(updates) % (run.samples // run.batch_size) == 0 else None

    return by_epoch


def assert_is_the_oracles(run: Run, microbatches: int, weights: dict[str, np.ndarray], result: dict[str, Any]) -> None:
    """Weights and logged losses; of accumulated batches Lightning logs the last one's."""
    epochs, limit, accumulate = (
        run.trainer.get(name, default)
        for name, default in (("max_epochs", 1), ("limit_train_batches", None), ("accumulate_grad_batches", 1))
    )
    batches = list(mini_batches_of(run, max(epochs, 1), limit, accumulate))[: run.trainer.get("max_steps")]
    max_norm = run.trainer.get("gradient_clip_val")
    expected, losses = oracle(run, microbatches, batches, max_norm=max_norm, after_update=after_update(run))
    assert_equal_weights(weights, expected)
    name = "train_loss" if run.module is small_gpt else "train_loss_step"
    logged = [(step, metrics[name]) for step, metrics in result["records"] if name in metrics]
    assert [step for step, _ in logged] == list(range(len(losses)))
    assert result["global_step"] == len(losses)
    if accumulate == 1:
        assert [loss for _, loss in logged] == pytest.approx(losses, rel=1e-6)


def over_processes(pools: Pools, run: Run, stages: int) -> list[dict[str, Any]]:
    return pools.run(stages, fit, replace(run, trainer=run.trainer | {"logger": "list"}))


@pytest.mark.parametrize("name", RUNS)
def test_stages_in_one_process(name: str) -> None:
    run, stages = RUNS[name]
    result = train(staged(run, stages))
    assert_is_the_oracles(run, run.options.get("microbatches", stages), result["weights"], result)


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_stages_in_processes(pools: Pools, tmp_path: Path, name: str) -> None:
    """Validations and checkpoints drain the pipeline, which changes the clock and not the trajectory."""
    run, stages = RUNS[name][0], OVER_PROCESSES[name]
    if "enable_checkpointing" in run.trainer:
        saving = {"dirpath": tmp_path, "every_n_train_steps": 3, "save_top_k": -1}
        run = replace(run, callbacks=((ModelCheckpoint, saving),))
    if run.module is small_gpt:  # from the meta device, whatever the number of stages
        whole = train(staged(replace(run, trainer={"max_steps": 0}), 1))["weights"]
        assert_equal_weights(joined_parts(pools.run(stages, initial_weights, run)), whole)
    results = over_processes(pools, run, stages)
    microbatches = run.options.get("microbatches", stages)
    assert_is_the_oracles(run, microbatches, joined_weights(results, stages), results[0])
    assert len({result["global_step"] for result in results}) == 1
    assert len({tuple(result["rates"]) for result in results}) == 1
    assert len(list(tmp_path.glob("*.ckpt"))) == (7 if "enable_checkpointing" in run.trainer else 0)
    assert all(("val_loss" in result["callback_metrics"]) == bool(run.val_samples) for result in results)


def test_synchronous_pipeline_is_a_plain_run(pools: Pools) -> None:
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    run = Run(Net, "sync", {}, trainer, optimizer="sgd", scheduler="decay-step", val_samples=(12,))
    results = pools.run(2, fit, run)
    plain = train(replace(run, strategy="plain"))
    joined = joined_weights(results, 2)
    assert sorted(joined) == sorted(plain["weights"])
    for name, weight in plain["weights"].items():
        np.testing.assert_allclose(joined[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)
    for result in results:
        assert result["steps"] == plain["steps"]
        assert result["rates"] == plain["rates"]
        assert result["callback_metrics"]["val_loss"] == pytest.approx(plain["callback_metrics"]["val_loss"], rel=1e-4)


def test_two_replicas_of_two_stages(pools: Pools) -> None:
    """The replicas' batches are more microbatches of the same mini-batch; equal to rounding."""
    run = Run(Net, options={"data_parallel_size": 2, "microbatches": 3}, shuffle=True, scheduler="decay-step")
    run = replace(run, trainer={"max_epochs": 2, "gradient_clip_val": 0.5, "logger": "list"}, samples=44, batch_size=4)
    results = pools.run(4, fit, run)
    batches = [
        list(pair)
        for epoch in range(2)
        for pair in zip(*(batches_of(run, epoch, replicas=2, replica=replica) for replica in range(2)))
    ]
    weights, losses = oracle(run, 3, batches, max_norm=0.5)
    for first in (0, 2):
        joined = joined_weights(results[first:], 2)
        for name, weight in weights.items():
            np.testing.assert_allclose(joined[name], weight, rtol=2e-3, atol=1e-5, err_msg=name)
    epochs = [m["train_loss_epoch"] for _, m in results[0]["records"] if "train_loss_epoch" in m]
    sizes = [8, 8, 8, 8, 8, 4]
    assert epochs == pytest.approx([np.average(losses[at : at + 6], weights=sizes) for at in (0, 6)], rel=1e-3)
    assert all(result["callback_metrics"] == results[0]["callback_metrics"] for result in results)


class AsItIs(Net):
    """A module around a network that does not say where it can be cut: blocks between an embedding and a head."""

    def __init__(self, run: Run) -> None:
        L.LightningModule.__init__(self)
        self.run, self.model = run, OwnBlocks()


class OwnBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        blocks = (nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Dropout(0.2)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


SIX: dict[str, Any] = {"microbatches": 6}
LEAST = {
    "least": replace(MUON, strategy="default", options=SIX | {"slack": "exact"}, val_samples=(16,)),
    "prediction": Run(Net, "default", SIX, TWO_EPOCHS, correction="prediction"),
    "masters": Run(Net, "default", SIX | {"weight_dtype": "bf16"}, {"precision": "bf16-mixed"}),
    "as it is": Run(AsItIs, "default", SIX, {"val_check_interval": 2}, val_samples=(16,)),
}


@pytest.mark.parametrize("name", LEAST)
def test_stages_of_least_staleness_are_those_of_one_process(pools: Pools, name: str) -> None:
    """Which the engine's own tests compare with the oracle; and the module is whole afterwards."""
    run = LEAST[name]
    results, alone = over_processes(pools, run, 3), train(staged(run))
    assert_equal_weights(joined_weights(results, 3), alone["weights"])
    assert (alone["global_step"], alone["records"]) == (results[0]["global_step"], results[0]["records"])


@pytest.mark.parametrize("there", ["process", "processes"])
def test_each_goes_on_from_the_others_checkpoint(pools: Pools, tmp_path: Path, there: str) -> None:
    """Saved in the middle of an epoch by the one, resumed by the other, as if nothing had happened."""
    run = Run(Net, "default", SIX, {"max_steps": 6, "max_epochs": 3}, error_feedback=True)
    saves = ((ModelCheckpoint, {"dirpath": str(tmp_path), "filename": "at", "every_n_train_steps": 5}),)
    first = replace(run, callbacks=saves, trainer={"max_steps": 5, "enable_checkpointing": True})
    going_on = replace(run, ckpt_path=str(tmp_path / "at.ckpt"))
    if there == "process":
        train(staged(first))
        actual = joined_weights(over_processes(pools, going_on, 3), 3)
    else:
        over_processes(pools, first, 3)
        actual = train(staged(going_on))["weights"]
    assert_equal_weights(actual, train(staged(run))["weights"])


class Branches(Net):
    """Nothing can cut this: a recurrent branch beside a convolution, no network of its own."""

    def __init__(self, run: Run) -> None:
        L.LightningModule.__init__(self)
        self.run = run
        self.recurrent, self.convolution = nn.GRU(1, 4, batch_first=True), nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        out = self.recurrent(x.unsqueeze(-1))[0].mean(1) + self.norm(self.convolution(x.unsqueeze(1))).mean(-1)
        loss = F.mse_loss(out.sum(-1, keepdim=True), batch["y"])
        self.log("train_loss", loss)
        return loss


def test_a_module_that_nothing_can_cut_is_one_stage() -> None:
    """Whose gradients are one update old, or, without a delay, those of a plain Trainer."""
    run = Run(Branches, scheduler="decay-step")
    plain = train(replace(run, strategy="plain"))["weights"]
    whole = train(delayed(run, microbatches=1, delay=0))["weights"]
    for weights, expected in ((whole, plain), (train(delayed(run, microbatches=1))["weights"], by_the_rule(run))):
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, expected[name], rtol=2e-6, atol=2e-7, err_msg=name)


def by_the_rule(run: Run) -> dict[str, np.ndarray]:
    """W_{t+1} = W_t - U(g_t) with g_t taken at W_{t-1}, in a plain loop; without random layers."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = run.make_optimizer(list(module.named_parameters()))
    scheduler = make_scheduler(run, optimizer)
    assert scheduler is not None
    parameters = list(module.parameters())
    older = [p.detach().clone() for p in parameters]
    for t, (batch,) in enumerate(mini_batches_of(run)):
        newest = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, older)
        optimizer.zero_grad()
        module.training_step(batch, t).backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, newest)
        older = newest
        optimizer.step()
        scheduler["scheduler"].step()
    return {name: p.detach().numpy() for name, p in module.named_parameters()}
