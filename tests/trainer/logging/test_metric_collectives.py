"""How often ranks exchange metrics."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, evaluate, fit

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "scatter",
)  # fmt: skip


def numbers_of_collectives(what: str, samples: int) -> list[int]:
    """How often each that somebody waits in is called, by Lightning and torchmetrics, too."""
    run = Run(Net, val_samples=(samples,), trainer={"max_epochs": 2})
    with ExitStack() as stack:
        spies = [stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in COLLECTIVES]
        fit(run) if what == "fit" else evaluate(run, what)
    return [sum(not call.kwargs.get("async_op") for call in spy.call_args_list) for spy in spies]


@pytest.mark.parametrize("what", ["validate", "fit"])
def test_collectives_of_an_evaluation_do_not_grow_with_its_batches(pools: Pools, what: str) -> None:
    few, many = (pools.run(2, numbers_of_collectives, what, 8 * batches) for batches in (2, 12))
    assert few == many
    assert all(sum(numbers) > 0 for numbers in few)
