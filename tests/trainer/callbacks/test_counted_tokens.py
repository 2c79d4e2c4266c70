"""Tokens that a run has seen, with a pipeline's own count and without; and the memory of stages on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp import TokensPerSecond
from lightning_asyncpp.trainer.callbacks import pipeline_monitor as memory


def test_under_a_pipeline_they_are_those_of_applied_updates() -> None:
    strategy, callback = SimpleNamespace(weight_seen=100.0), TokensPerSecond()  # 100 of an earlier training
    module: Any = None
    callback.on_train_start(SimpleNamespace(strategy=strategy), module)  # type: ignore[arg-type]
    strategy.weight_seen += 32
    assert callback.state_dict() == {"tokens_seen": 32.0}
    callback.on_train_start(SimpleNamespace(strategy=strategy), module)  # type: ignore[arg-type]
    strategy.weight_seen += 8
    resumed = TokensPerSecond()
    resumed.load_state_dict(callback.state_dict())
    resumed.on_train_start(SimpleNamespace(strategy=SimpleNamespace(weight_seen=0.0)), module)  # type: ignore[arg-type]
    assert resumed.tokens_seen == 40


def test_elsewhere_they_are_those_of_batches() -> None:
    callback = TokensPerSecond()
    trainer: Any = SimpleNamespace(strategy=object(), distributed_sampler_kwargs={"num_replicas": 2})
    module: Any = SimpleNamespace(micro_batch_weight=lambda batch: 5.0)
    callback.on_train_start(trainer, module)
    for _ in range(3):
        callback.on_train_batch_start(trainer, module, None, 0)
        callback._measure(trainer, module, None)
    assert callback.tokens_seen == 30


def test_memory_is_the_largest_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(
        mesh=SimpleNamespace(stage=1, num_stages=2), watch=SimpleNamespace(collective=nullcontext)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000_000_000)
    monkeypatch.setattr(memory, "exchange", lambda mesh, own: [own, "0 1000000000", "1 2000000000", "0 1500000000"])
    peaks = memory.peak_memory(session, torch.device("cuda:0"))
    assert peaks == {"peak_memory_stage_0": 1.5, "peak_memory_stage_1": 3.0}
    assert memory.peak_memory(session, torch.device("cpu")) == {}
