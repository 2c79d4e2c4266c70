"""Kinds of devices as data: published figures, and what is left of them is for the reader to say."""

from __future__ import annotations

import os
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One kind of device: peaks, and bytes per second in one direction."""

    name: str
    memory_gib: float  # what a program can allocate: a little less than what the name says
    tflops: float  # of dense products in bf16, summed in fp32
    bandwidth: float  # GB/s of its own memory
    link: float  # GB/s to another device of the node
    network: float  # GB/s to a device of another node
    per_node: int  # devices, unless the recipe says how many there are
    source: str  # of these figures
    is_gpu: bool = True


_IB_400, _IB_200, _ETHERNET_100 = 50.0, 25.0, 12.5

DEVICES = {
    device.name: device
    for device in (
        Device("h100", 79.1, 989, 3350, 450, _IB_400, 8, "H100 SXM data sheet; DGX H100: 400 Gbit/s per GPU"),
        Device("h200", 139.8, 989, 4800, 450, _IB_400, 8, "H200 SXM data sheet; DGX H200: 400 Gbit/s per GPU"),
        Device("a100", 79.1, 312, 2039, 300, _IB_200, 8, "A100 80GB SXM data sheet; DGX A100: 200 Gbit/s per GPU"),
        Device("a100-40", 39.4, 312, 1555, 300, _IB_200, 8, "A100 40GB SXM data sheet; DGX A100: 200 Gbit/s per GPU"),
        Device("b200", 178.4, 2250, 8000, 900, _IB_400, 8, "HGX B200 data sheet; DGX B200: 400 Gbit/s per GPU"),
        Device("l40s", 44.4, 362, 864, 25, _ETHERNET_100, 8, "L40S data sheet; PCIe 4.0 x16, 100 Gbit/s"),
        Device("rtx4090", 23.5, 165, 1008, 20, 1.25, 8, "Ada whitepaper; PCIe 4.0 by way of the host, 10 Gbit/s"),
        Device("cpu", 0.0, 0.1, 20, 5, 0.125, 1, "one core, by assumption; memory is this machine's", False),
    )
}  # fmt: skip
"""By name. NVLink's published figure counts both directions; half of it is here."""

RESERVE_SHARE = 0.05
RESERVE_GIB = 2.0
"""What is left free of a GPU: the context of CUDA, the buffers of NCCL and cuBLAS, and gaps between allocations."""

HOP_SECONDS = 20e-6
"""What a message between two devices takes beside its bytes: an assumption."""


def default_reserve(device: Device) -> float:
    """GiB of a device that are left free."""
    return RESERVE_GIB + RESERVE_SHARE * device.memory_gib if device.is_gpu else 0.0


def host_memory_gib() -> float:
    """Memory of this machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
