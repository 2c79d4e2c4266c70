"""PipelineMonitor logs throughput, bubble, staleness, gradient norm and memory while a pipeline trains."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_asyncpp import PipelineMonitor
from lightning_asyncpp.trainer.callbacks import pipeline_monitor
from tests.helpers.pool import Pools
from tests.helpers.recorded import SleepingNet
from tests.helpers.trainer import Net, Run, fit, loader, make_model, staged, train

MONITOR = (PipelineMonitor, {"window": 3, "every_n_batches": 1, "peak_flops": 1e6})
RUN = Run(Net, callbacks=(MONITOR,), samples=48, trainer={"logger": "list"})


class CountingNet(SleepingNet):
    """Module whose tokens and operations are known: 10 tokens per sample, 1000 operations per token."""

    flops_per_token = 1000.0

    def microbatch_weight(self, batch: dict[str, torch.Tensor]) -> float:
        return 10.0 * len(batch["x"])


def values(result: dict[str, Any], name: str) -> list[float]:
    return [metrics[name] for _, metrics in result["records"] if name in metrics]


def test_the_logger_gets_every_figure(pools: Pools) -> None:
    """Logged values fit layers that sleep 90 ms per microbatch; a flush per batch would make a bubble of a third.

    The validation before the last batch takes another second, which does not count.
    """
    run = replace(RUN, val_samples=(128,), trainer={"logger": "list", "val_check_interval": 5})
    last, first = pools.run(2, fit, replace(run, module=CountingNet, options={"microbatches": 2}))
    assert values(last, "gradient_staleness")[:4] == [0, 1, 1, 1]
    bubble, rate = (values(last, name)[-1] for name in ("bubble", "tokens_per_second"))
    assert 0 < min(values(last, "bubble")) < 0.3
    assert bubble < 0.55
    assert rate == pytest.approx(80 / (0.18 / (1 - bubble)), rel=0.15)
    assert values(last, "mfu")[-1] == pytest.approx(rate * 1000.0 / 2e6, rel=1e-6)
    assert values(last, "tokens_seen")[:5] == [80.0 * (batch + 1) for batch in range(5)]
    assert not values(first, "bubble")


def test_the_norm_is_that_of_the_whole_gradient_before_clipping() -> None:
    """The norm is that of the whole unclipped gradient; without ``microbatch_weight``, no token rate is logged."""
    run = replace(RUN, strategy="sync", trainer={"logger": "list", "gradient_clip_val": 1e-3})
    result = train(staged(run))
    norms = values(result, "gradient_norm")
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.training_step(next(iter(loader(run))), 0).backward()
    whole = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in module.parameters()]))  # type: ignore[union-attr]
    assert norms[0] == pytest.approx(float(whole), rel=1e-5)
    assert len(set(norms)) == len(norms) > 3
    assert not values(result, "tokens_per_second") + values(result, "mfu")


@pytest.mark.parametrize(("slack", "by_stage"), [(1, [0.5, 0.25]), ("exact", [0.25, 0.25])])
def test_the_least_staleness_is_the_mean_over_parameters(slack: Any, by_stage: list[float]) -> None:
    run = replace(RUN, options={"microbatches": 4, "staleness": "least", "slack": slack, "partition": [3, 6]})
    start = 2 if slack == 1 else 1  # mini-batches without delay; slack 1 clips the second one by the norm of the first
    layers = list(make_model(0.0))
    sizes = [sum(p.numel() for layer in part for p in layer.parameters()) for part in (layers[:3], layers[3:])]
    mean = sum(share * size for share, size in zip(by_stage, sizes)) / sum(sizes)
    assert sizes[0] != sizes[1]
    expected = pytest.approx([0] * start + [mean] * (4 - start))
    assert values(train(staged(run, 2)), "gradient_staleness")[:4] == expected


def test_memory_is_the_largest_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, watch = SimpleNamespace(stage=1, num_stages=2), SimpleNamespace(collective=nullcontext)
    found = ["0 1000000000", "1 2000000000", "0 1500000000"]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000_000_000)
    monkeypatch.setattr(pipeline_monitor, "all_gather_object", lambda mesh, own: [own, *found])
    peaks = pipeline_monitor.peak_memory(SimpleNamespace(mesh=mesh, watch=watch), torch.device("cuda:0"))  # type: ignore[arg-type]
    assert peaks == {"peak_memory_stage_0": 1.5, "peak_memory_stage_1": 3.0}
