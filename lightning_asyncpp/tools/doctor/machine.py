"""What the machine and the installation are like: facts alone, no opinions; nothing in them is secret."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_asyncpp.pipeline.interfaces import LOOPBACK, address_of

PACKAGES = ("lightning-asyncpp", "lightning", "torch", "triton", "torchmetrics", "litdata")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "TORCHINDUCTOR_")
"""Environment variables that a report shows begin so; others may hold what is nobody's business."""

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as the driver says it.
        memory_gib: all of it, in GiB.
        free_gib: what was free.
        sms: streaming multiprocessors.
        capability: compute capability.
        shared_memory_kib: that a block may ask for, in KiB; 0 if torch does not say.
    """

    name: str
    memory_gib: float
    free_gib: float
    sms: int
    capability: tuple[int, int]
    shared_memory_kib: int


@dataclass(frozen=True)
class Machine:
    """What was found out.

    Attributes:
        system: operating system and architecture.
        python: version.
        packages: name -> version, of those that are installed.
        cpus: cores that this process may use.
        memory_gib: of the host.
        shm_gib: what is free of /dev/shm; ``None`` if there is none.
        compiler: the host's C++ compiler, which ``torch.compile`` needs; empty if there is none.
        cuda: that torch was built for; empty: it was not built for NVIDIA GPUs.
        driver: the NVIDIA driver's version; empty if there is none.
        nccl: version; ``None`` without.
        gpus: that torch sees.
        peer_access: [i][j]: whether GPU i reaches the memory of GPU j.
        topology: what ``nvidia-smi topo -m`` says of several GPUs.
        interfaces: network interfaces -> whether they have an IPv4 address.
        environment: variables that begin with one of :data:`PREFIXES`.
        errors: what could not be found out, and why.
    """

    system: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    cpus: int = 1
    memory_gib: float = 0.0
    shm_gib: float | None = None
    compiler: str = ""
    cuda: str = ""
    driver: str = ""
    nccl: tuple[int, ...] | None = None
    gpus: list[Gpu] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    topology: str = ""
    interfaces: dict[str, bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it for other processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read what :meth:`save` wrote."""
        facts = json.loads(path.read_text(encoding="utf-8"))
        gpus = [Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in facts["gpus"]]
        nccl = None if facts["nccl"] is None else tuple(facts["nccl"])
        return cls(**{**facts, "gpus": gpus, "nccl": nccl})


def examined_machine() -> Machine:
    """Look at this machine; what raises is left out, and named in ``errors``."""
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}
    probes: Mapping[str, Callable[[], Any]] = {
        "system": platform.platform,
        "python": platform.python_version,
        "packages": _packages,
        "cpus": lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "shm_gib": lambda: shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else None,
        "compiler": lambda: shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or "",
        "driver": _driver,
        "interfaces": lambda: {name: address_of(name) is not None for _, name in socket.if_nameindex()},
        "environment": lambda: {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
        "cuda": _cuda,
        "gpus": _gpus,
        "nccl": _nccl,
        "peer_access": _peer_access,
        "topology": _topology,
    }
    for name, probe in probes.items():
        try:
            facts[name] = probe()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return Machine(**facts, errors=errors)


def used_interface(machine: Machine) -> str:
    """The interfaces that a run on this machine alone would use, as :func:`.interfaces.use_interface` settles it."""
    if named := machine.environment.get("GLOO_SOCKET_IFNAME"):
        return named
    return LOOPBACK if LOOPBACK in machine.interfaces else "any"


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if "triton" not in found and importlib.util.find_spec("triton") is not None:
        found["triton"] = "of another package"
    return found


def _driver() -> str:
    """From what the kernel module says: it answers also where the driver does not."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return ""
    words = path.read_text().split()
    return next((word for word in words if word[0].isdigit() and "." in word), words[0])


def _cuda() -> str:
    import torch

    return torch.version.cuda or ""


def _gpus() -> list[Gpu]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            Gpu(
                properties.name, total / GIB, free / GIB, properties.multi_processor_count,
                (properties.major, properties.minor),
                getattr(properties, "shared_memory_per_block_optin", 0) // 1024,
            )
        )  # fmt: skip
    return found


def _nccl() -> tuple[int, ...] | None:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return tuple(int(part) for part in torch.cuda.nccl.version()[:3])


def _peer_access() -> list[list[bool]]:
    import torch

    count = range(torch.cuda.device_count())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in count] for i in count]


def _topology() -> str:
    import torch

    if torch.cuda.device_count() < 2 or shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "topo", "-m"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
