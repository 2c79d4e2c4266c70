"""A budget of what makes the host wait for the GPU in training: a place that is added is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_asyncpp.core.host_copies import Reading
from tests.helpers.pool import Pools
from tests.nccl_rules.counted_runs import MICROBATCHES, Counted, Found, count
from tests.nccl_rules.host_waits import DEVICE, HostWaits, Wait, is_on_device

# Waits per mini-batch and stage. Both come when all must have agreed on an update, for a gradient whose last backward
# was launched long before: normally the device has got there, and nobody waits. An update itself waits for nothing.
BUDGET = {
    Wait(
        "mini-batch", "Event.synchronize", "core/updates/mini_batch.py:send_message"
    ): 1,  # norms, counts, losses, logged values
    Wait("mini-batch", "Event.synchronize", "core/updates/reduction.py:_read"): 1,  # norms of what replicas summed
}
# Of a stage that steps ahead of the others, where there are replicas: it counts their samples and asks which gradients
# any of them has.
STEPS_AHEAD = {
    Wait("update", "copy", "core/updates/mini_batch.py:reduce_now"): 1,
    Wait("update", "Event.synchronize", "core/updates/mini_batch.py:send_message"): 1,
    Wait("update", "Event.synchronize", "core/updates/reduction.py:_read"): 1,
}
MOST = 2
MIXED = {"precision": "bf16-mixed"}

MORE_CASES = {
    "plain, logged": (2, Counted(logs=True)),
    "replicas that step ahead": (4, Counted("weighted", {"data_parallel_size": 2}, clip=1.0)),
    "tied": (3, Counted("tied", clip=1.0)),
    "experts, replicas": (4, Counted("experts", {"data_parallel_size": 2}, clip=1.0, logs=True)),
    "synchronous": (2, Counted("gpt", clip=1.0, logs=True, synchronous=True)),
    "2BW, replicas": (4, Counted("weighted", {"staleness": "uniform", "data_parallel_size": 2}, clip=1.0)),
    "exact, skips": (3, Counted("gpt", {"slack": "exact", "nonfinite_gradients": "skip"}, clip=1.0)),
    "bf16 weights": (2, Counted("gpt", {"weight_dtype": "bf16"}, clip=1.0, optimizer="muon", trainer=MIXED)),
    "accumulated": (2, Counted("gpt", clip=1.0, trainer={"accumulate_grad_batches": 2})),
    "feedback": (2, Counted("gpt", clip=1.0, correction="feedback", optimizer="muon")),
    "prediction": (2, Counted("gpt", clip=1.0, correction="prediction")),
}


def check(pools: Pools, world_size: int, counted: Counted) -> None:
    agrees_first = counted.options.get("staleness") == "uniform" or counted.options.get("slack") == "exact"
    replicas = counted.options.get("data_parallel_size", 1)
    budget = BUDGET | (STEPS_AHEAD if replicas > 1 and not agrees_first else {})
    for rank, found in enumerate(pools.run(world_size, count, counted, timeout=120)):
        over = {wait: number for wait, number in found.waits.items() if number > budget.get(wait, 0)}
        assert not over, f"rank {rank} waits for the device, per mini-batch: {over}"
        assert sum(found.waits.values()) <= MOST
        assert (found.mixed, found.early) == ({}, {})
        # Beside shared parameters the thread that sends their gradients may have waited for what comes after the norm.
        assert found.waits or counted.module == "tied", "the norm at least is read"


def test_no_stage_waits_more_than_it_may(pools: Pools) -> None:
    check(pools, 3, Counted("experts", clip=1.0, logs=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_no_stage_of_other_runs_waits_more_than_it_may(pools: Pools, name: str) -> None:
    check(pools, *MORE_CASES[name])


def test_a_checkpoint_that_is_gathered_mixes_no_devices(pools: Pools) -> None:
    """The optimizer's counts are on the host; and what stages share, the first rank has on its GPU or from another."""
    for found in pools.run(3, count, Counted("tied", correction="feedback", optimizer="muon", saves=True), timeout=120):
        assert (found.mixed, found.early) == ({}, {})


def test_what_a_user_adds_is_found(pools: Pools) -> None:
    last, first = pools.run(2, count, Counted("waits"), timeout=120)
    assert added(last) == {
        Wait("mini-batch", "tensor(..., device=)", "lightning/pytorch/trainer/call.py:_call_lightning_module_hook"): 1,
        Wait("microbatch", "item", "trainer/step_log.py:run"): 2 * MICROBATCHES,
        Wait("microbatch", "mask as index", "trainer/step_log.py:run"): MICROBATCHES,
    }
    assert list(added(first).values()) == [1]  # its step ends where the model is called


def added(found: Found) -> dict[Wait, float]:
    return {wait: number for wait, number in found.waits.items() if wait not in BUDGET}


@pytest.fixture
def waits() -> Iterator[HostWaits]:
    waits = HostWaits()
    waits.counting = True
    with waits.watching():
        yield waits


def test_every_kind_of_wait_is_counted(waits: HostWaits) -> None:
    x, host = torch.ones(4, device=DEVICE), torch.zeros(4)
    assert float(x[0]) == x.tolist()[0] == x.numpy()[0] == 1.0
    assert not is_on_device(x.cpu())
    if x.sum() > 3:
        x[x > 2] = 0.0
    host.copy_(x)
    torch.tensor([1.0], device=DEVICE)
    host.to(DEVICE)
    assert torch.equal(x, x)
    assert {wait.what: number for wait, number in waits.waits.items()} == {
        "item": 2, "tolist": 1, "numpy": 1, "copy": 2, "mask as index": 1, "copy_": 1, "tensor(..., device=)": 1,
        "equal": 1,
    }  # fmt: skip


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


def test_operands_on_both_sides_are_found(waits: HostWaits) -> None:
    torch.ones(4, device=DEVICE) * torch.tensor(2.0)
    assert not waits.mixed
    torch.ones(4, device=DEVICE) * torch.ones(4)
    assert [wait.what for wait in waits.mixed] == ["mul"]
