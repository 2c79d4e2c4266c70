"""Set-ups of models, loaders and loops that a worker process runs."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_asyncpp.fabric import AsyncPipelineStrategy, SyncPipelineStrategy
from lightning_asyncpp.fabric.strategy import PipelineStrategy
from lightning_asyncpp.models import GPT, GPTConfig
from tests.helpers.cases import Case, Sleeping, make_model
from tests.helpers.fabric import Run, make_fabric

CONFIG = GPTConfig(vocab_size=11, context_length=4, num_layers=2, dim=8, num_heads=2)


def initial_weights(empty_init: bool) -> tuple[dict[str, Any], int, str]:
    """The gathered initial weights, this rank's number of parameters, and where they were built."""
    strategy = AsyncPipelineStrategy()
    fabric = make_fabric(strategy, seed=3)
    with fabric.init_module(empty_init=empty_init):
        model = GPT(CONFIG)
    device = next(model.parameters()).device.type
    wrapped = fabric.setup_module(model)
    state = strategy.full_state_dict()
    return (
        {name: value.numpy() for name, value in state.items()},
        sum(1 for p in wrapped.parameters() if p.stride() != (0,) * p.ndim),
        device,
    )


def measured_layers() -> tuple[tuple[int, ...], str]:
    """The cut of a model whose first layer is the slow one, by its example."""
    model = nn.Sequential(Sleeping(6, 10.0), *[Sleeping(6, 1.0) for _ in range(4)])
    model.example_input_array = torch.ones(4, 6)  # type: ignore[assignment]
    strategy = AsyncPipelineStrategy()
    make_fabric(strategy, precision="bf16-true").setup_module(model)
    partition = strategy.session.partition
    assert partition is not None
    return partition.counts, partition.source


def seed_without_seed_everything() -> int:
    strategy = AsyncPipelineStrategy()
    fabric = make_fabric(strategy)
    with_seed = os.environ.pop("PL_GLOBAL_SEED")
    assert with_seed == "5"
    fabric.setup_module(make_model())
    return strategy.session.seed


def original_module_in_the_step(wrapped: bool) -> dict[str, Any]:
    """Train by calling what ``setup_module`` returned, or the model that it was given."""
    case = Case(3)
    run = Run(case)
    model = run.model if wrapped else run.model.module
    for index in range(3):
        run.strategy.training_step(case.step(model), case.batch(index))
        run.optimizer.step()
    return run.result()


def compiled_as_a_whole(compiled: bool) -> dict[str, Any]:
    """Train what was given to ``torch.compile`` before Fabric got it, or the same as it is."""
    case = Case(3)
    strategy = AsyncPipelineStrategy(microbatches=case.microbatches)
    fabric = make_fabric(strategy)
    model = case.make_model()
    wrapped = fabric.setup_module(torch.compile(model, backend="eager") if compiled else model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=0.01))
    for index in range(3):
        strategy.training_step(case.step(wrapped), case.batch(index))
        optimizer.step()
    strategy.drain()
    mesh, stage = strategy.session.mesh, strategy.session.stage
    assert mesh is not None
    assert stage is not None
    weights = {name: p.detach().numpy().copy() for name, p in stage.parameters.items()}
    return {"weights": weights, "replica": mesh.replica, "stage": mesh.stage}


def by_name(name: str) -> list[Any]:
    """What ``Fabric(strategy=name)`` made, and a loss after each of three steps with the default options."""
    fabric = L.Fabric(strategy=name, devices=2, accelerator="cpu")
    fabric.launch()
    strategy = fabric.strategy
    assert isinstance(strategy, PipelineStrategy)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    losses = []
    for _ in range(4):
        loss = strategy.training_step(Case(2).step(model), Case(2).batch(0))
        losses += [] if loss is None else [loss.item()]
        optimizer.step()
    strategy.drain()
    return [type(strategy).__name__, strategy.delay, losses]


def clipped_by_value() -> list[float]:
    """Largest and typical absolute change of a weight under SGD with lr 1 and ``clip_val`` 1e-3."""
    strategy = SyncPipelineStrategy()
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    strategy.training_step(Case(2).step(model), Case(2).batch(0))
    fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    optimizer.step()
    changes = torch.cat([(p.detach() - b).abs().flatten() for p, b in zip(model.parameters(), before)])
    return [changes.max().item(), changes.median().item()]


def hooks_of_the_model() -> float | None:
    """The loss of a batch whose leaves are not all batched, with hooks that are methods of the model."""

    class Hooked(nn.Sequential):
        loss_reduction = "sum"

        def split_batch(self, batch: dict[str, Tensor], parts: int) -> list[Any]:
            return [{"x": x, "table": batch["table"]} for x in batch["x"].tensor_split(parts)]

        def microbatch_weight(self, microbatch: dict[str, Tensor]) -> float:
            return 2.0 * len(microbatch["x"])

    strategy = AsyncPipelineStrategy(microbatches=2)
    fabric = make_fabric(strategy)
    layers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = fabric.setup_module(Hooked(*layers))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"x": torch.ones(4, 2), "table": torch.tensor([3.0, 5.0, 7.0])}
    loss = strategy.training_step(lambda part: (model(part["x"]) * part["table"].sum()).sum(), batch)
    optimizer.step()
    strategy.drain()
    return None if loss is None else loss.item()


class Endless(IterableDataset):
    """A stream without a length."""

    def __iter__(self) -> Any:
        return iter(torch.arange(12.0).view(6, 2))


def loaders(replicas: int) -> dict[str, Any]:
    """What this rank reads from a shuffled loader in two epochs, and what its workers draw."""
    strategy = AsyncPipelineStrategy(data_parallel_size=replicas)
    fabric = make_fabric(strategy, seed=3)
    torch.manual_seed(7)
    data = TensorDataset(torch.arange(24))
    shuffled = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    stream = fabric.setup_dataloaders(DataLoader(Endless(), batch_size=2))
    mesh = strategy.session.mesh
    assert mesh is not None
    return {
        "reads": mesh.is_first or mesh.is_last,
        "replica": mesh.replica,
        "length": (len(shuffled), len(shuffled.dataset), shuffled.batch_size),
        "epochs": [[_plain(batch) for batch in shuffled] for _ in range(2)],
        "stream": [_plain(batch) for batch in stream],
        "augmentation": _drawn_by_a_worker(shuffled),
    }


def _drawn_by_a_worker(loader: Any) -> float:
    torch.manual_seed(1)
    loader.worker_init_fn(0)
    return random.random()


def _plain(batch: Any) -> Any:
    return repr(batch)


def train_from_loaders() -> list[float]:
    """Losses of a loop over loaders on three stages, of which the middle one reads nothing."""
    strategy = AsyncPipelineStrategy(staleness="uniform")
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = strategy.training_step(lambda part: F.mse_loss(model(part[0]), part[1]), batch)
            losses += [] if loss is None else [loss.item()]
            optimizer.step()
    strategy.drain()
    return losses


def local_state() -> dict[str, Any]:
    """``state_dict`` on the last stage alone, which must not wait for anybody, and scheduler warnings."""
    case = Case(3, scheduler=True)
    run = Run(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(stop=2)
    state = {**run.model.state_dict(), **run.optimizer.state_dict()} if run.mesh.is_last else {}
    run.strategy.drain()
    norm = run.strategy.gradient_norm
    return {"keys": list(state), "warnings": [str(w.message) for w in caught], "norm": norm}


def load_weights_alone(path: str) -> dict[str, Any]:
    """Load the weights of a checkpoint into a run with any number of stages, strictly."""
    strategy = AsyncPipelineStrategy(microbatches=3)
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_model())
    fabric.load(path, {"model": model})
    return {name: value.numpy() for name, value in strategy.full_state_dict().items()}
