"""Machines that tests of ``asyncpp doctor`` pretend to be on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_asyncpp.tools.doctor.machine import Gpu, Machine

H100 = Gpu("NVIDIA H100 80GB HBM3", 79.1, 78.6, 132, (9, 0), 227)

CPUS = Machine(
    "Linux", "3.11.7", {"torch": "2.14.1", "lightning": "2.6.6"}, 2, 8.0, 4.0, "/usr/bin/g++", "/usr/bin/gcc",
    cuda="13.0", interfaces={"lo": True},
)  # fmt: skip


def with_gpus(count: int = 2, **changes: Any) -> Machine:
    """A machine with GPUs where nothing is wrong but what is changed."""
    packages = {**CPUS.packages, "triton": "3.8.0"}
    everybody = [[True] * count] * count
    machine = replace(
        CPUS, packages=packages, driver="580.65.06", nccl=(2, 29, 7), gpus=[H100] * count, peer_access=everybody,
        topology="GPU0 NV18", cpus=16,
    )  # fmt: skip
    return replace(machine, **changes)
