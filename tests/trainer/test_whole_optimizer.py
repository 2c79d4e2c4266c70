"""Optimizers as they are written for one process: stages train what a plain Trainer trains, with the same state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset

from lightning_asyncpp import GPTModule
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from tests.helpers.cases import DIM
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, arrays, fit, loader, make_trainer

ATOL = 1e-6


def two_groups(module: L.LightningModule) -> Any:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    return AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.02}], lr=0.01)


def rate_by_number_of_parameters(module: L.LightningModule) -> Any:
    return AdamW(module.parameters(), lr=2.0 / sum(p.numel() for p in module.parameters()))


def rate_by_layer(module: L.LightningModule) -> Any:
    return SGD([{"params": [p], "lr": 0.02 / (1 + i)} for i, p in enumerate(module.parameters())])


def rate_of_every_group(module: L.LightningModule) -> Any:
    optimizer = two_groups(module)
    scheduler = LambdaLR(optimizer, [lambda t: 1.0 / (1 + t), lambda t: 0.9**t])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def one_cycle(module: L.LightningModule) -> Any:
    optimizer = two_groups(module)
    total = int(module.trainer.estimated_stepping_batches)
    return [optimizer], [{"scheduler": OneCycleLR(optimizer, [0.05, 0.02], total), "interval": "step"}]


def plateau(module: L.LightningModule) -> Any:
    optimizer = two_groups(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


def what_is_trained(module: L.LightningModule) -> Any:
    return AdamW(filter(lambda p: p.requires_grad, module.parameters()), lr=0.01)


def biases(module: L.LightningModule) -> Any:
    return AdamW([p for name, p in module.named_parameters() if name.endswith("bias")], lr=0.01)


OPTIMIZERS: dict[str, Callable[[L.LightningModule], Any]] = {
    "two groups": two_groups,
    "rate by number of parameters": rate_by_number_of_parameters,
    "rate by layer": rate_by_layer,
    "a rate of every group": rate_of_every_group,
    "one cycle": one_cycle,
    "plateau": plateau,
    "what is trained": what_is_trained,
    "biases": biases,
    "names": lambda module: SGD(module.named_parameters(), lr=0.05, momentum=0.9),
    "fused": lambda module: AdamW(module.parameters(), lr=0.01, fused=True),
    "foreach": lambda module: AdamW(module.parameters(), lr=0.01, foreach=True),
    "state at once": lambda module: Adagrad(module.parameters(), lr=0.05),
    "Muon": lambda module: MuonAdamW(module.named_parameters(), lr=0.02, newton_schulz_dtype="float32"),
    "unnamed Muon": lambda module: MuonAdamW(module.parameters(), lr=0.02, newton_schulz_dtype="float32"),
    "unnamed Muon in Error Feedback": lambda module: ErrorFeedback(
        module.parameters(), lambda params: MuonAdamW(params, lr=0.02, newton_schulz_dtype="float32")
    ),
    "Error Feedback of two groups": lambda module: ErrorFeedback(
        two_groups(module).param_groups, lambda params: AdamW(params, lr=0.01)
    ),
}


class Made(Net):
    """Its optimizer is one of those above; nothing but the last layers is trained where that is its business."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.optimizer == "what is trained":
            self.model[:-1].requires_grad_(False)  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.run.optimizer](self)


class DealtOut(Made):
    """Replicas share every batch."""

    def train_dataloader(self) -> DataLoader:
        given = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        replicas, replica = given["num_replicas"], given["rank"]
        return DataLoader(Subset(Samples(40), range(replica, 40, replicas)), batch_size=8 // replicas)


class Tied(Made):
    """The first and the last layer share a weight."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(3)
        layers = [nn.Linear(DIM, DIM) for _ in range(4)]
        layers[-1].weight = layers[0].weight
        self.model = nn.Sequential(*layers, nn.Linear(DIM, 1))


def tiny_gpt(run: Run) -> L.LightningModule:
    """Built without memory, of which each stage gets its own."""
    config = GPTConfig(vocab_size=32, context_length=8, num_layers=2, dim=8, num_heads=2, init_std=0.2)
    return GPTModule(config, optimizer=lambda named: AdamW([p for _, p in named], lr=0.01, fused=True))


def run_of(optimizer: str, module: Any = Made, **more: Any) -> Run:
    trainer = {"max_epochs": 2, **more.pop("trainer", {})}
    return Run(module, "sync", {"microbatches": 2}, optimizer=optimizer, trainer=trainer, **more)


def saving(run: Run, folder: Path) -> Run:
    saves = (ModelCheckpoint, {"dirpath": folder, "save_top_k": -1, "filename": "{step}"})
    return replace(run, callbacks=(saves,), trainer={**run.trainer, "enable_checkpointing": True})


def plain(run: Run) -> Run:
    return replace(run, strategy="plain", options={})


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def assert_close(actual: Any, expected: Any, where: str = "") -> None:
    """Numbers and tensors but for rounding, everything else equal."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, (one, other) in enumerate(zip(actual, expected)):
            assert_close(one, other, f"{where}[{number}]")
    elif isinstance(expected, (float, torch.Tensor, np.ndarray)):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=ATOL, err_msg=where)
    else:
        assert actual == expected, where


SLOW = ("foreach", "names", "a rate of every group", "rate by layer")
PLAIN = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in OPTIMIZERS
    if "Error Feedback" not in name and "unnamed" not in name
]


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLAIN)
def test_trains_as_a_plain_trainer(pools: Pools, name: str, stages: int, tmp_path: Path) -> None:
    """The weights, and the whole state of the optimizer and its scheduler, as a plain checkpoint holds it."""
    run = run_of(name, trainer={"gradient_clip_val": 0.3})
    expected = fit(plain(saving(run, tmp_path / "plain")))
    weights = joined_weights(pools.run(stages, fit, saving(run, tmp_path / "stages")), stages)
    assert_close(weights, expected["weights"])
    one, other = (read(tmp_path / kind / "step=10.ckpt") for kind in ("stages", "plain"))
    for entry in ("optimizer_states", "lr_schedulers", "state_dict"):
        assert_close(one[entry], other[entry], entry)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_names_come_from_the_module(pools: Pools, stages: int) -> None:
    unnamed, named = (pools.run(stages, fit, run_of(name)) for name in ("unnamed Muon", "Muon"))
    assert_equal_weights(joined_weights(unnamed, stages), joined_weights(named, stages))


@pytest.mark.parametrize("module", [Tied, tiny_gpt])
def test_models_train_as_on_one_stage(pools: Pools, module: Any) -> None:
    run = run_of("two groups", module, dataset="tokens" if module is tiny_gpt else "samples")
    [expected] = pools.run(1, fit, run)
    found: dict[str, Any] = {}
    for result in pools.run(2, fit, run):
        found = {**result["weights"], **found}
    assert_close({name: found[name] for name in expected["weights"]}, expected["weights"])


def test_replicas_train_as_one_process(pools: Pools) -> None:
    run = run_of("two groups", DealtOut)
    [expected] = pools.run(1, fit, replace(run, options={"microbatches": 4}))
    for result in pools.run(4, fit, replace(run, options={"microbatches": 2, "data_parallel_size": 2})):
        assert_close(result["weights"], {name: expected["weights"][name] for name in result["weights"]})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Error Feedback of two groups", {}),
        ("unnamed Muon in Error Feedback", {}),
        pytest.param("two groups", {"weight_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("Error Feedback of two groups", {"weight_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_async_goes_on_with_other_stages(pools: Pools, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Bitwise: no state depends on the cut."""
    precision = {"precision": "bf16-mixed"} if options else {}
    options = {"microbatches": 3, "staleness": "uniform", **options}
    run = replace(run_of(name, trainer=precision), strategy="async", options=options)
    whole = joined_weights(pools.run(2, fit, saving(run, tmp_path)), 2)
    resumed = pools.run(3, fit, replace(run, ckpt_path=str(tmp_path / "step=5.ckpt")))
    assert_equal_weights(joined_weights(resumed, 3), whole)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("two groups", 2),
        *(pytest.param("two groups", stages, marks=pytest.mark.slow) for stages in (1, 3, 4)),
        pytest.param("one cycle", 2, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_are_plain_both_ways(pools: Pools, name: str, stages: int, tmp_path: Path) -> None:
    """What a pipeline saved a plain Trainer goes on from, with its optimizer, and the other way round."""
    run = run_of(name)
    expected = fit(plain(saving(run, tmp_path / "plain")))["weights"]
    pools.run(stages, fit, saving(run, tmp_path / "stages"))
    first = "step=5.ckpt"
    assert_close(fit(replace(plain(run), ckpt_path=str(tmp_path / "stages" / first)))["weights"], expected)
    resumed = replace(run, ckpt_path=str(tmp_path / "plain" / first))
    assert_close(joined_weights(pools.run(stages, fit, resumed), stages), expected)


@pytest.mark.slow
def test_checkpoints_are_ddps_both_ways(pools: Pools, tmp_path: Path) -> None:
    run = run_of("two groups")
    ddp, first = replace(run, strategy="ddp", options={}), "step=5.ckpt"
    pools.run(2, fit, saving(ddp, tmp_path / "ddp"))
    resumed = replace(run, ckpt_path=str(tmp_path / "ddp" / first))
    expected = fit(plain(resumed))["weights"]
    assert_close(joined_weights(pools.run(2, fit, resumed), 2), expected)
    pools.run(2, fit, saving(run, tmp_path / "stages"))
    paths = (str(tmp_path / folder / first) for folder in ("stages", "plain"))
    fit(plain(saving(run, tmp_path / "plain")))
    one, other = (pools.run(2, fit, replace(ddp, ckpt_path=path))[0]["weights"] for path in paths)
    assert_close(one, other)


def fit_twice(run: Run, validate: bool) -> tuple[dict[str, np.ndarray], list[int]]:
    """Train a module twice, or validate it before, with an optimizer that was made at the beginning."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    optimizer = two_groups(module)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    if validate:
        make_trainer(run).validate(module, loader(run), verbose=False)
    else:
        make_trainer(run).fit(module, loader(run))
    make_trainer(run).fit(module, loader(run))
    named = arrays(dict(module.named_parameters()))
    return named, [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("validate", [True, False])
def test_an_optimizer_that_was_made_before(pools: Pools, validate: bool) -> None:
    """It holds the whole model again afterwards, so that it can be used once more."""
    run = run_of("two groups")
    expected, sizes = fit_twice(plain(run), validate)
    results = pools.run(2, fit_twice, run, validate)
    assert_close({name: value for weights, _ in results for name, value in weights.items()}, expected)
    assert [found for _, found in results] == [sizes] * 2
