"""Runs by the oracle, in the test's own process, and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_asyncpp.reference import train_reference
from tests.helpers.trainer import DATASETS, Run, arrays, make_scheduler


def batches_of(run: Run, epoch: int, limit: int | None = None, replicas: int = 1, replica: int = 0) -> list[Any]:
    """Return the batches of an epoch, in the order that every stage must see."""
    data = DATASETS[run.dataset](run.samples)
    sampler: Any = DistributedSampler(data, num_replicas=replicas, rank=replica, shuffle=run.shuffle, seed=run.seed)
    sampler.set_epoch(epoch)
    return list(DataLoader(data, batch_size=run.batch_size, sampler=sampler))[:limit]


def mini_batches_of(run: Run, epochs: int = 1, limit: int | None = None, accumulate: int = 1) -> Iterator[list[Any]]:
    for epoch in range(epochs):
        batches = batches_of(run, epoch, limit)
        yield from (batches[i : i + accumulate] for i in range(0, len(batches), accumulate))


def oracle(
    run: Run, microbatches: int, mini_batches: list[list[Any]], max_norm: float | None = None,
    after_update: Callable[[torch.optim.Optimizer], Callable[[], None]] | None = None, start: int = 0,
) -> tuple[dict[str, np.ndarray], list[float]]:  # fmt: skip
    """Return final weights and each mini-batch's loss; the first ``start`` mini-batches are trained synchronously."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    delay = 0 if run.strategy == "sync" else 1
    optimizer = run.make_base(list(module.named_parameters()))
    after = after_update(optimizer) if after_update is not None else None
    if after is None and (scheduler := make_scheduler(run, optimizer)) is not None:
        after = scheduler["scheduler"].step

    def step(microbatch: Any) -> Tensor:
        result = module.training_step(microbatch, 0)
        return result["loss"] if isinstance(result, dict) else result

    weight = getattr(module, "microbatch_weight", lambda batch: float(len(batch["x"])))
    losses = train_reference(
        module.model, step, mini_batches, optimizer, microbatches=microbatches, delay=delay, max_norm=max_norm,
        error_feedback=1.0 if run.error_feedback and delay else None, after_update=after,
        weight=weight, seed=run.seed, synchronous_start=start,
    )  # fmt: skip
    return arrays(dict(module.named_parameters())), losses


def joined_weights(results: list[dict[str, Any]], stages: int) -> dict[str, np.ndarray]:
    """Return the weights of the first replica's stages; check that weights on several stages are equal."""
    return joined_parts([result["weights"] for result in results[:stages]])


def joined_parts(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    joined: dict[str, np.ndarray] = {}
    for part in parts:
        assert all(np.array_equal(joined[name], part[name]) for name in joined.keys() & part.keys())
        joined |= part
    return joined


def assert_equal_weights(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Check that weights are bitwise equal."""
    assert sorted(actual) == sorted(expected)
    different = [name for name in expected if not np.array_equal(actual[name], expected[name])]
    assert not different, f"not bitwise equal: {different}"


def plain_module(run: Run, weights: dict[str, np.ndarray]) -> L.LightningModule:
    """Return the whole module in this process, with the given weights and in evaluation mode."""
    module = run.module(run)
    module.configure_model()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return module.eval()
