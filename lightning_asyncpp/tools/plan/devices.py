"""Kinds of devices: published figures, and the shares of these figures that training is assumed to reach."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports torch, which is too slow for `asyncpp plan --help`
    from lightning_asyncpp.tools.plan.recipe import Recipe

GIB = 2**30
HOP_SECONDS = 20e-6
"""Assumed latency of a message between two devices."""


@dataclass(frozen=True)
class Device:
    """Kind of device on which a recipe runs; speeds are peaks, those of links in one direction."""

    name: str
    memory: float  # GiB that a program can allocate, a little less than the nominal size; 0 for the host's memory
    tflops: float  # of dense products in bf16, summed in fp32
    bandwidth: float  # GB/s of the device's memory
    link: float  # GB/s to another device of the node
    network: float  # GB/s to a device of another node
    devices_per_node: int = 8
    is_gpu: bool = True
    mfu: float = 0.4  # share of the peak that forwards and backwards reach, recomputation counted as work
    bandwidth_share: float = 0.7  # share of the memory's bandwidth that the optimizer reaches

    @property
    def room(self) -> float:
        """Number of bytes that a stage may take."""
        # The reserve is for the context of CUDA, buffers of NCCL and cuBLAS, and gaps between allocations.
        reserve = 2.0 + 0.05 * self.memory if self.is_gpu else 0.0
        return (self.memory - reserve) * GIB

    def compute(self, flops: float) -> float:
        """Return the seconds of a forward or a backward."""
        return flops / (self.tflops * 1e12 * self.mfu)

    def update(self, moved: int, flops: int) -> float:
        """Return the seconds of an update: its memory traffic, then its matrix products (Newton-Schulz)."""
        return moved / (self.bandwidth * 1e9 * self.bandwidth_share) + self.compute(flops)

    def bytes_per_second(self, ranks: Sequence[int]) -> float:
        """Return the speed of the slowest link between the ranks."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        return (self.link if len(nodes) == 1 else self.network) * 1e9


# Links are half of NVLink's published figures, which count both directions. Networks are those of NVIDIA's DGX or HGX.
_IB_400, _IB_200, _ETHERNET_100, _ETHERNET_10 = 50.0, 25.0, 12.5, 1.25

DEVICES = {
    device.name: device
    for device in (
        Device("h100", 79.1, 989, 3350, 450, _IB_400),  # SXM data sheet
        Device("h200", 139.8, 989, 4800, 450, _IB_400),  # SXM data sheet
        Device("a100", 79.1, 312, 2039, 300, _IB_200),  # 80GB SXM data sheet
        Device("a100-40", 39.4, 312, 1555, 300, _IB_200),  # 40GB SXM data sheet
        Device("b200", 178.4, 2250, 8000, 900, _IB_400),  # HGX data sheet
        Device("l40s", 44.4, 362, 864, 25, _ETHERNET_100),  # data sheet; PCIe 4.0 x16
        Device("rtx4090", 23.5, 165, 1008, 20, _ETHERNET_10),  # Ada whitepaper; PCIe 4.0 by way of the host
        Device("cpu", 0.0, 0.1, 20, 5, 0.125, is_gpu=False),  # one core, by assumption
    )
}
"""Kinds of devices by name."""


def device_of(name: str, recipe: Recipe, memory: float | None = None, mfu: float = 0.4) -> Device:
    """Return the device for a recipe, with nodes that are large enough for the recipe.

    Args:
        name: name of the kind.
        recipe: recipe to run.
        memory: memory in GiB; default: the kind's; for CPUs, a process's share of this machine's memory.
        mfu: share of the peak that is reached, see :class:`Device`.
    """
    kind = DEVICES[name]
    usual = max(recipe.per_node, kind.devices_per_node if kind.is_gpu else recipe.devices)
    per_node = recipe.per_node if recipe.nodes > 1 else usual
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    memory = memory or kind.memory or host / min(per_node, recipe.devices)
    return replace(kind, devices_per_node=per_node, memory=memory, mfu=mfu)
