"""What is logged while a pipeline trains: throughput, bubble, staleness."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import measure_flops
from torch import nn

from lightning_asyncpp import ConfigurationError, GPTModule, PipelineMonitor, PipelineTrace
from lightning_asyncpp.core.cut.units import Unit
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.models import GPTConfig
from tests.helpers.pool import Pools
from tests.helpers.recorded import SleepingNet
from tests.helpers.trainer import Net, Run, fit, loader, make_model

MONITOR = (PipelineMonitor, {"window": 3, "every_n_batches": 1})
RUN = Run(Net, callbacks=(MONITOR,), samples=48, trainer={"logger": "list"})


class CountingNet(SleepingNet):
    """Its tokens and operations are known: 8 samples of 10 tokens, 1000 operations each."""

    flops_per_token = 1000.0

    def microbatch_weight(self, batch: dict[str, torch.Tensor]) -> float:
        return 10.0 * len(batch["x"])


class BatchNet(CountingNet):
    """It says what a batch takes instead."""

    flops_per_batch = 160_000


def values(results: list[dict[str, Any]], name: str) -> list[float]:
    return [metrics[name] for _, metrics in results[0]["records"] if name in metrics]


@pytest.mark.parametrize(
    ("strategy", "staleness"), [("async", [0, 1, 1, 1]), pytest.param("sync", [0, 0, 0, 0], marks=pytest.mark.slow)]
)
def test_the_logger_gets_every_figure(pools: Pools, strategy: str, staleness: list[int]) -> None:
    """Layers sleep for 90 ms a microbatch; a flush of two stages costs a third of two microbatches' time."""
    run = replace(RUN, strategy=strategy, module=CountingNet, options={"microbatches": 2})
    results = pools.run(2, fit, replace(run, callbacks=((MONITOR[0], {**MONITOR[1], "peak_flops": 1e6}),)))
    assert values(results, "gradient_staleness")[: len(staleness)] == staleness
    bubble, rate = (values(results, name)[-1] for name in ("bubble", "tokens_per_second"))
    least = min(values(results, "bubble"))
    assert 0 < least < 0.3 if strategy == "async" else 0.3 < least < 0.6
    assert rate == pytest.approx(80 / (0.18 / (1 - bubble)), rel=0.15)
    assert values(results, "mfu")[-1] == pytest.approx(rate * 1000.0 / 2e6, rel=1e-6)
    assert not any("bubble" in metrics for _, metrics in results[1]["records"])
    assert values(results, "tokens_seen")[:5] == [80.0 * (batch + 1) for batch in range(5)]


def test_the_norm_is_that_of_the_whole_gradient_before_clipping(pools: Pools) -> None:
    run = replace(RUN, strategy="sync", trainer={"logger": "list", "gradient_clip_val": 1e-3})
    norms = values(pools.run(2, fit, run), "gradient_norm")
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    batch = next(iter(loader(run)))
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.training_step(batch, 0).backward()
    whole = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in module.parameters()]))  # type: ignore[union-attr]
    assert norms[0] == pytest.approx(float(whole), rel=1e-5)
    assert len(set(norms)) == len(norms) > 3


def test_operations_of_a_batch_are_taken_as_they_are(pools: Pools) -> None:
    run = replace(RUN, module=BatchNet, callbacks=((MONITOR[0], {**MONITOR[1], "peak_flops": 1e6}),))
    results = pools.run(2, fit, run)
    assert values(results, "mfu")[-1] == pytest.approx(values(results, "tokens_per_second")[-1] * 2000 / 2e6, rel=1e-6)


def test_what_is_not_known_is_not_logged(pools: Pools) -> None:
    """No tokens without microbatch_weight, no share of a peak that nobody knows."""
    results = pools.run(2, fit, replace(RUN, callbacks=((PipelineMonitor, {"every_n_batches": 4}),)))
    names = {name for _, metrics in results[0]["records"] for name in metrics}
    assert {"bubble", "gradient_norm", "gradient_staleness"} <= names
    assert not names & {"tokens_per_second", "mfu"}


def test_it_works_beside_a_recording_and_with_middle_stages(pools: Pools, tmp_path: Any) -> None:
    trace = (PipelineTrace, {"dirpath": str(tmp_path / "trace"), "mini_batches": 2})
    results = pools.run(
        3,
        fit,
        replace(RUN, callbacks=(MONITOR, trace), val_samples=(8,), trainer={"logger": "list", "val_check_interval": 2}),
    )
    assert values(results, "gradient_staleness")[-1] == 1
    assert len(list((tmp_path / "trace").iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "numbers of at least 1: window=0, "),
        ({"every_n_batches": 0}, "numbers of at least 1: .* every_n_batches=0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipelineMonitor(**arguments)


def test_frozen_parameters_have_no_gradient_that_could_be_old() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    first.bias.requires_grad_(False)
    units = [Unit("0", first), Unit("1", second)]
    assert WholeModel.of(units, (1, 1)).num_trained == (6, 4)


@pytest.mark.parametrize(("slack", "by_stage"), [(1, [0.5, 0.25]), ("exact", [0.25, 0.25])])
def test_the_least_staleness_is_the_mean_over_parameters(pools: Pools, slack: Any, by_stage: list[float]) -> None:
    run = replace(RUN, options={"microbatches": 4, "staleness": "least", "slack": slack, "partition": [3, 6]})
    results = pools.run(2, fit, run)
    start = 2 if slack == 1 else 1  # mini-batches without a delay: the second is clipped by the norm of the first
    layers = list(make_model(0.0))
    sizes = [sum(p.numel() for layer in part for p in layer.parameters()) for part in (layers[:3], layers[3:])]
    mean = sum(share * size for share, size in zip(by_stage, sizes)) / sum(sizes)
    assert sizes[0] != sizes[1]
    assert values(results, "gradient_staleness")[:4] == pytest.approx([0] * start + [mean] * (4 - start))


def test_the_models_operations_are_those_that_torch_counts() -> None:
    """Forward and backward on the meta device; torch counts attention without its causal half, as we do."""
    config = GPTConfig(vocab_size=64, context_length=32, num_layers=3, dim=64, num_heads=4, num_kv_heads=2)
    with torch.device("meta"):
        model = GPTModule(config).build_model()
        tokens = torch.zeros((2, 32), dtype=torch.int64)
    counted = measure_flops(model, lambda: model(tokens), lambda logits: logits.float().sum())
    assert GPTModule(config).flops_per_token * 64 == pytest.approx(counted, rel=0.05)
    assert math.isfinite(config.flops_per_token())
