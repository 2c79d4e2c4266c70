"""``delayed_gradient`` trains in one process what a pipeline trains in several, bit for bit."""

from __future__ import annotations

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

from lightning_asyncpp import ConfigurationError, DelayedGradientStrategy
from tests.helpers.cases import DIM
from tests.helpers.modules import SummingNet, WeighingNet, small_gpt
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, delayed, fit, make_scheduler, train

STAGES = 3


def in_processes(pools: Pools, run: Run, stages: int = STAGES) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The weights of a pipeline of processes, and what its rank 0 reports."""
    results = pools.run(stages, fit, replace(run, trainer=run.trainer | {"logger": "list"}))
    return joined_weights(results, stages), results[0]


class OwnBlocks(nn.Module):
    """A network that does not say where it can be cut: blocks with dropout between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class AsItIs(Net):
    """A module around a network that is cut as it is."""

    def __init__(self, run: Run) -> None:
        L.LightningModule.__init__(self)
        self.run, self.model = run, OwnBlocks()


RUNS = {
    "least": Run(Net, "default", {"microbatches": 6}, dropout=0.3, scheduler="decay-step"),
    "slack": Run(Net, "default", {"microbatches": 6, "slack": "exact"}, trainer={"gradient_clip_val": 0.3}),
    "uniform": Run(Net, "async", {"microbatches": 4, "lookahead": 1}, optimizer="muon", error_feedback=True),
    "sync": Run(Net, "sync", {"microbatches": 4}, dropout=0.3, trainer={"accumulate_grad_batches": 2}),
    "feedback": Run(Net, "default", {"microbatches": 6}, optimizer="muon", error_feedback=True, val_samples=(16,)),
    "prediction": Run(Net, "default", {"microbatches": 6}, correction="prediction", trainer={"max_epochs": 2}),
    "masters": Run(
        Net, "default", {"microbatches": 6, "weight_dtype": "bf16"}, trainer={"precision": "bf16-mixed"}
    ),
    "as it is": Run(AsItIs, "default", {"microbatches": 6}, val_samples=(16,), trainer={"val_check_interval": 2}),
    "tied": Run(small_gpt, "default", {"microbatches": 6}, dataset="tokens", optimizer="muon"),
    "weights": Run(WeighingNet, "default", {"microbatches": 6}),
    "sums": Run(SummingNet, "default", {"microbatches": 6}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_it_equals_the_pipeline(pools: Pools, name: str) -> None:
    run = RUNS[name]
    expected, rank_0 = in_processes(pools, run)
    options = {**run.options, "delay": int(run.strategy != "sync"), "stages": STAGES}
    if run.strategy == "async":
        options["staleness"] = "uniform"
    actual = train(delayed(run, **options))
    trained = {weights: actual["weights"][weights] for weights in expected}
    assert_equal_weights(trained, expected)
    assert actual["global_step"] == rank_0["global_step"]
    assert actual["records"] == rank_0["records"]


@pytest.mark.parametrize("there", ["process", "processes"])
def test_each_goes_on_from_the_others_checkpoint(pools: Pools, tmp_path: Path, there: str) -> None:
    """Saved in the middle of an epoch by the one, resumed by the other, as if nothing had happened."""
    run = Run(Net, "default", {"microbatches": 6}, error_feedback=True, trainer={"max_steps": 6, "max_epochs": 3})
    whole, _ = in_processes(pools, run)
    saves = ((ModelCheckpoint, {"dirpath": str(tmp_path), "filename": "at", "every_n_train_steps": 5}),)
    first = replace(run, callbacks=saves, trainer={"max_steps": 5, "enable_checkpointing": True})
    going_on = replace(run, ckpt_path=str(tmp_path / "at.ckpt"))
    options = {"microbatches": 6, "stages": STAGES}
    if there == "process":
        train(delayed(first, **options))
        actual, _ = in_processes(pools, going_on)
    else:
        in_processes(pools, first)
        actual = train(delayed(going_on, **options))["weights"]
    assert_equal_weights(actual, whole)


class Branches(Net):
    """Nothing can cut this: a recurrent branch beside a convolution, tied weights, no network of its own."""

    def __init__(self, run: Run) -> None:
        L.LightningModule.__init__(self)
        self.run = run
        self.recurrent = nn.GRU(1, 4, batch_first=True)
        self.convolution = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(run.dropout))
        self.mix, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.back.weight = self.mix.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(x.unsqueeze(-1))[0].mean(1) + self.convolution(x.unsqueeze(1)).mean(-1)
        return self.scale * self.back(self.mix(hidden).relu()).sum(-1, keepdim=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch["x"]), batch["y"]))


def by_the_rule(run: Run) -> dict[str, np.ndarray]:
    """W_{t+1} = W_t - U(g_t) with g_t taken at W_{t-1}, in a plain loop; without random layers."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = run.make_optimizer(list(module.named_parameters()))
    scheduler = make_scheduler(run, optimizer)
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
        if scheduler is not None:
            scheduler["scheduler"].step()
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_module_that_nothing_can_cut_is_one_stage(optimizer: str) -> None:
    run = Run(Branches, optimizer=optimizer, scheduler="decay-step", val_samples=(8,))
    for name, weights in train(delayed(run, microbatches=1))["weights"].items():
        np.testing.assert_allclose(weights, by_the_rule(run)[name], rtol=2e-6, atol=2e-7, err_msg=name)


def test_without_a_delay_a_module_trains_as_with_a_plain_trainer() -> None:
    run = Run(Branches, val_samples=(8,))
    plain = train(replace(run, strategy="plain"))
    actual = train(delayed(run, microbatches=1, delay=0))
    for name, weights in plain["weights"].items():
        np.testing.assert_allclose(actual["weights"][name], weights, rtol=2e-6, atol=2e-7, err_msg=name)
    assert actual["callback_metrics"].keys() == plain["callback_metrics"].keys()


def test_the_module_is_whole_afterwards() -> None:
    L.seed_everything(5, verbose=False)
    run = delayed(RUNS["as it is"], stages=STAGES, microbatches=6)
    module = AsItIs(run)
    train(replace(run, module=lambda _: module))
    assert module.model(torch.zeros(2, DIM)).shape == (2, 1)
    assert len(module.state_dict()) == len(AsItIs(run).state_dict())


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"stages": 0}, 1, r"stages=0 must be a whole number of at least 1"),
        ({"stages": 2, "delay": 2}, 1, r"delay=2 must be 0 or 1"),
        ({"stages": 3, "microbatches": 2}, 1, r"microbatches=2 is smaller"),
        ({"stages": 2}, 2, r"devices=2: delayed_gradient runs all stages of a pipeline in one process"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], devices: int, message: str) -> None:
    run = Run(Net)
    with pytest.raises(ConfigurationError, match=message):
        L.Trainer(
            strategy=DelayedGradientStrategy(**options), accelerator="cpu", devices=devices, logger=False,
            enable_checkpointing=False, max_epochs=1,
        ).fit(Net(run))  # fmt: skip
