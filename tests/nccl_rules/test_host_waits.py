"""In training the host waits for the GPU only at the places of a budget, so that an added wait is found."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lightning_asyncpp.core.host_copies import Reading
from tests.helpers.modules import small_gpt
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run
from tests.nccl_rules.counted_runs import EXPERTS, MICROBATCHES, Found, Waits, Weighted, count, run_of
from tests.nccl_rules.host_waits import DEVICE, HostWaits, Wait, is_on_device

READ, SENT = "core/updates/reduction.py:_read", "core/updates/mini_batch.py:send_message"
# Waits per mini-batch and stage. Both occur when all stages must have agreed on an update, long after the last backward
# of its gradient was launched: normally the device is done by then, and nobody waits. Updates wait for nothing.
BUDGET = {
    Wait("mini-batch", "Event.synchronize", SENT): 1,  # norms, counts, losses, logged values
    Wait("mini-batch", "Event.synchronize", READ): 1,  # norms of gradients summed over replicas
}
# Further waits of a stage that steps ahead of the others, with replicas: it reads the sum of their weights, and which
# gradients any of them has.
STEPS_AHEAD = {
    Wait("update", "copy", "core/updates/mini_batch.py:reduce_now"): 1,
    Wait("update", "Event.synchronize", SENT): 1,
    Wait("update", "Event.synchronize", READ): 1,
}
MOST = 2
LOGS: dict[str, Any] = {"logger": "list", "enable_progress_bar": True}
TIED = partial(small_gpt, tie_embeddings=True)
TWO: dict[str, Any] = {"data_parallel_size": 2}

MORE_RUNS = {
    "replicas that step ahead": (4, run_of(Weighted, options=TWO)),
    "2BW, replicas": (4, run_of(Weighted, options=TWO | {"staleness": "uniform"})),
    "tied": (3, run_of(TIED)),
    "synchronous": (2, run_of(small_gpt, strategy="sync", trainer=LOGS)),
    "exact, skips": (3, run_of(small_gpt, options={"slack": "exact", "nonfinite_gradients": "skip"})),
    "bf16 weights": (
        2, run_of(small_gpt, options={"weight_dtype": "bf16"}, optimizer="muon", trainer={"precision": "bf16-mixed"}),
    ),
    "accumulated, feedback": (
        2, run_of(small_gpt, correction="feedback", optimizer="muon", trainer={"accumulate_grad_batches": 2}),
    ),
    "prediction": (2, run_of(small_gpt, correction="prediction")),
}  # fmt: skip


def check(pools: Pools, world_size: int, run: Run) -> None:
    agrees_first = run.options.get("staleness") == "uniform" or run.options.get("slack") == "exact"
    replicas = run.options.get("data_parallel_size", 1)
    budget = BUDGET | (STEPS_AHEAD if replicas > 1 and not agrees_first else {})
    for rank, found in enumerate(pools.run(world_size, count, run, timeout=120)):
        over = {wait: number for wait, number in found.waits.items() if number > budget.get(wait, 0)}
        assert not over, f"rank {rank} waits for the device, per mini-batch: {over}"
        assert sum(found.waits.values()) <= MOST
        assert (found.mixed, found.early) == ({}, {})
        # With shared parameters, the thread that sends their gradients may have waited for an event after the norm.
        assert found.waits or run.module is TIED, "the norm at least is read"


def test_no_stage_waits_more_than_it_may(pools: Pools) -> None:
    check(pools, 2, run_of(partial(small_gpt, moe=EXPERTS), trainer=LOGS))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_RUNS)
def test_no_stage_of_other_runs_waits_more_than_it_may(pools: Pools, name: str) -> None:
    check(pools, *MORE_RUNS[name])


@pytest.mark.slow
def test_updates_and_a_checkpoint_that_is_gathered_mix_no_devices(pools: Pools) -> None:
    """Step counts of the optimizer are on the host; the first rank has shared values on its GPU or from another."""
    for found in pools.run(3, count, run_of(TIED, False, correction="feedback", optimizer="muon"), True, timeout=120):
        assert (found.mixed, found.early) == ({}, {})


def test_what_a_user_adds_is_found(pools: Pools) -> None:
    last, first = pools.run(2, count, run_of(Waits, clips=False), timeout=120)
    assert added(last) == {
        Wait("mini-batch", "tensor(..., device=)", "lightning/pytorch/trainer/call.py:_call_lightning_module_hook"): 1,
        Wait("microbatch", "item", "trainer/step_log.py:run"): 2 * MICROBATCHES,
        Wait("microbatch", "mask as index", "trainer/step_log.py:run"): MICROBATCHES,
    }
    assert list(added(first).values()) == [1]  # the first stage's training step ends where the model is called


def added(found: Found) -> dict[Wait, float]:
    return {wait: number for wait, number in found.waits.items() if wait not in BUDGET}


@pytest.fixture
def waits() -> Iterator[HostWaits]:
    waits = HostWaits()
    waits.counting = True
    with waits.watching():
        yield waits


def test_every_kind_of_wait_and_mixed_operands_are_counted(waits: HostWaits) -> None:
    x, host = torch.ones(4, device=DEVICE), torch.zeros(4)
    assert float(x[0]) == x.tolist()[0] == x.numpy()[0] == 1.0
    assert not is_on_device(x.cpu())
    if x.sum() > 3:
        x[x > 2] = 0.0
    host.copy_(x)
    torch.tensor([1.0], device=DEVICE)
    host.to(DEVICE)
    assert torch.equal(x, x)
    x * torch.tensor(2.0)
    assert not waits.mixed
    x * torch.ones(4)
    assert [wait.what for wait in waits.mixed] == ["mul"]
    once = dict.fromkeys(("tolist", "numpy", "mask as index", "copy_", "tensor(..., device=)", "equal"), 1)
    assert {wait.what: number for wait, number in waits.waits.items()} == {"item": 2, "copy": 2, **once}


def test_a_reading_keeps_order_dtypes_and_what_was_there_when_it_began(waits: HostWaits) -> None:
    x, flag = torch.tensor([[1.5, -2.0]]).to(DEVICE, non_blocking=True), torch.ones(3, device=DEVICE).bfloat16()
    large = torch.full((), 2**53 - 1, device=DEVICE)
    nothing, on_host = torch.zeros(0, device=DEVICE), torch.tensor(0.1)
    reading = Reading([flag, x, large, nothing, x[0, 1].double(), on_host, flag[0] > 0])
    x.zero_()
    assert not reading.is_there()
    assert not waits.waits
    read = [[1.0, 1.0, 1.0], [1.5, -2.0], [float(2**53 - 1)], [], [-2.0], [on_host.item()], [1.0]]
    reading._copy.tensor.tolist()  # type: ignore[union-attr]
    assert sum(waits.early.values()) == 1, "read before its event"
    assert reading.get() == reading.get() == read
    assert reading.is_there()
    assert sum(waits.waits.values()) == sum(waits.early.values()) == 1
