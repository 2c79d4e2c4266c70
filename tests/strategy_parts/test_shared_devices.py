"""The backend where several ranks of a machine share a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.process_group import backend_of, queue_warning

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


@pytest.mark.parametrize("given", ["nccl", "NCCL"])
def test_nccl_needs_gpus(given: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"process_group_backend='{given}' needs GPUs.*on cpu: leave the"):
        backend_of([CPU, CPU], given)


def test_a_shared_gpu_needs_gloo() -> None:
    assert backend_of([FIRST, SECOND, FIRST], None) == "gloo"
    assert backend_of([FIRST, FIRST], "gloo") == "gloo"
    with pytest.raises(ConfigurationError, match=r"process_group_backend='NCCL'.*\['cuda:0', 'cuda:0'\].*leave the"):
        backend_of([FIRST, FIRST], "NCCL")


@pytest.mark.parametrize(
    ("device", "connections", "warns"),
    [("cuda:0", "1", True), ("cuda:0", "8", False), ("cuda:0", None, False), ("cpu", "1", False)],
)
def test_one_hardware_queue_is_warned_of(device: str, connections: str | None, warns: bool) -> None:
    warning = queue_warning(torch.device(device), connections)
    assert (warning is not None and "CUDA_DEVICE_MAX_CONNECTIONS=1" in warning and "unset it" in warning) == warns
