"""The backend where several ranks of a machine share a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_asyncpp.core.ranks.process_groups import backend_of

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        *itertools.product([None, [], [CPU, CPU], [FIRST], [FIRST, SECOND]], [None, "gloo"]),
        *itertools.product([None, [], [FIRST], [FIRST, SECOND]], ["nccl"]),
    ],
)
def test_nothing_is_changed_where_nobody_shares(devices: list[torch.device] | None, given: str | None) -> None:
    assert backend_of(devices, given) == given


def test_a_shared_gpu_needs_gloo() -> None:
    assert backend_of([FIRST, SECOND, FIRST], None) == "gloo"
    assert backend_of([FIRST, FIRST], "gloo") == "gloo"
