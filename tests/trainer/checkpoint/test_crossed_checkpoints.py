"""A checkpoint that was written for something else: every reader says who wrote it, and what reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_asyncpp.core.checkpoint.origin import origin_of
from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy
from tests.core.cases import Case, make_model
from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, fit


def in_fabric(strategy: Any) -> tuple[L.Fabric, dict[str, Any]]:
    """A model and its optimizer, after an update."""
    fabric = L.Fabric(strategy=strategy, devices=strategy_devices(strategy), accelerator="cpu")
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    strategy.training_step(Case(2).step(model), Case(2).batch(0))
    optimizer.step()
    return fabric, {"model": model, "optimizer": optimizer}


def strategy_devices(strategy: Any) -> int:
    return 2 if isinstance(strategy, AsyncPipelineStrategy) else 1


def fabric_pipeline(path: str, save: bool) -> None:
    fabric, state = in_fabric(AsyncPipelineStrategy(micro_batches=2))
    fabric.save(path, state) if save else fabric.load(path, state)


def fabric_delayed(path: str, save: bool) -> None:
    fabric, state = in_fabric(DelayedGradientStrategy(micro_batches=2))
    fabric.save(path, state) if save else fabric.load(path, state)


def trainer_run(strategy: str, path: str, save: bool) -> Run:
    folder, _, name = path.rpartition("/")
    saving = (ModelCheckpoint, {"dirpath": folder, "filename": name.removesuffix(".ckpt")})
    run = Run(Net, strategy, {"micro_batches": 2}, samples=16)
    if save:
        return Run(Net, strategy, run.options, samples=16, callbacks=(saving,), trainer={"enable_checkpointing": True})
    return Run(Net, strategy, run.options, samples=16, ckpt_path=path)


def trainer_pipeline(path: str, save: bool) -> None:
    fit(trainer_run("default", path, save))


def trainer_delayed(path: str, save: bool) -> None:
    fit(trainer_run("delayed", path, save))


WAYS: dict[str, tuple[int, Callable[[str, bool], None]]] = {
    "trainer": (2, trainer_pipeline), "trainer-delayed": (1, trainer_delayed),
    "fabric": (2, fabric_pipeline), "fabric-delayed": (1, fabric_delayed),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("crossed")
    paths = {name: str(folder / f"{name}.ckpt") for name in WAYS}
    for name, (processes, way) in WAYS.items():
        pools.run(processes, way, paths[name], True)
    weights = make_model().state_dict()
    torch.save(weights, folder / "weights.ckpt")
    torch.save({"net": weights, "step": 3}, folder / "other.ckpt")
    return paths | {name: str(folder / f"{name}.ckpt") for name in ("weights", "other")}


BY_A_TRAINER = "was written by a Trainer from a pipeline of 2 stages: trainer.fit(module, ckpt_path=...)"
BY_FABRIC = "was written by fabric.save from a pipeline of 2 stages: fabric.load goes on from it"
OF_FABRIC = "load the entry of the model into self.model"
ALONE = "load 'state_dict' (without the 'model.' before its names) into the whole model"
CROSSED = [
    ("trainer", "fabric", [BY_FABRIC, "(model, optimizer, pipeline)", OF_FABRIC]),
    ("trainer", "fabric-delayed", ["by fabric.save under delayed_gradient", OF_FABRIC]),
    ("trainer", "weights", ["holds weights alone (0.weight, 0.bias, ", "load them into self.model"]),
    ("trainer", "other", ["neither by a Trainer nor by fabric.save under a strategy of ours (net, step)"]),
    ("trainer", "trainer-delayed", ["was not written by a pipeline strategy"]),
    ("trainer-delayed", "fabric", [BY_FABRIC, OF_FABRIC]),
    ("trainer-delayed", "trainer", ["this checkpoint was written by a pipeline strategy"]),
    ("fabric", "trainer", [BY_A_TRAINER, ALONE]),
    ("fabric", "trainer-delayed", ["by a Trainer under delayed_gradient", ALONE]),
    ("fabric", "fabric-delayed", ["by fabric.save under delayed_gradient", "load the model's entry into the whole"]),
    ("fabric", "weights", ["holds weights alone (0.weight, 0.bias, ", "fabric.load_raw reads it"]),
    ("fabric-delayed", "trainer", [BY_A_TRAINER, ALONE]),
    ("fabric-delayed", "fabric", [BY_FABRIC, "load the model's entry into the whole"]),
]


@pytest.mark.parametrize(("reader", "file", "parts"), CROSSED, ids=[f"{a} reads {b}" for a, b, _ in CROSSED])
def test_a_checkpoint_for_something_else(
    pools: Pools, files: dict[str, str], reader: str, file: str, parts: list[str]
) -> None:
    processes, way = WAYS[reader]
    for outcome in pools.outcomes(processes, way, files[file], False):
        assert outcome.error == "ConfigurationError", outcome.trace
        assert all(part in outcome.message for part in parts), outcome.message


def test_an_entry_that_is_not_there_stays_a_missing_entry(pools: Pools, files: dict[str, str]) -> None:
    for outcome in pools.outcomes(2, fabric_pipeline, files["other"], False):
        assert outcome.error == "KeyError"
        assert "'model'" in outcome.message


def test_its_own_checkpoints_are_read(pools: Pools, files: dict[str, str]) -> None:
    for name, (processes, way) in WAYS.items():
        pools.run(processes, way, files[name], False)


def test_what_the_messages_promise(files: dict[str, str]) -> None:
    """The weights of one kind load into the other's model."""
    whole = make_model()
    for name in ("trainer", "trainer-delayed"):
        state = torch.load(files[name], weights_only=True)["state_dict"]
        whole.load_state_dict({key.removeprefix("model."): value for key, value in state.items()})
    for name in ("fabric", "fabric-delayed"):
        whole.load_state_dict(torch.load(files[name], weights_only=True)["model"])
    assert "is no checkpoint: it holds a Linear" in origin_of(nn.Linear(2, 2)).description
