"""What the machine and the installation are like: facts alone, no opinions; nothing in them is secret."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_asyncpp.core.ranks.interfaces import LOOPBACK, address_of
from lightning_asyncpp.private_names import installed_versions
from lightning_asyncpp.tools.plan.devices import GIB, host_memory_gib
from lightning_asyncpp.tools.processes import run_limited

PACKAGES = ("lightning-asyncpp", "lightning", "torch", "triton", "torchmetrics", "litdata")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "TORCHINDUCTOR_")
"""Environment variables that a report shows begin so; others may hold what is nobody's business."""

HIDDEN = ("NCCL_COMM_ID", "NCCL_HOSTID")
"""Those of them whose values name machines."""
NOT_SET_BY_USERS = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lightning sets it when it is imported."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


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
        c_compiler: with which Triton builds what launches a kernel; empty if there is none.
        has_headers: whether Python's headers are there, which that takes, too.
        cuda: that torch was built for; empty: it was not built for NVIDIA GPUs.
        hip: ROCm's version that torch was built for instead; empty if it was not.
        driver: the NVIDIA driver's version; empty if there is none.
        nccl: version; ``None`` without.
        gpus: that torch sees.
        peer_access: [i][j]: whether GPU i reaches the memory of GPU j.
        topology: what ``nvidia-smi topo -m`` says of several GPUs; empty if it says nothing.
        is_exclusive: whether a GPU takes one process alone, as ``nvidia-smi`` says.
        interfaces: network interfaces -> whether they have an IPv4 address.
        environment: variables that begin with one of :data:`PREFIXES`.
        errors: what could not be found out, and why.
        is_complete: whether all was looked at: a driver may hang.
    """

    system: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    cpus: int = 1
    memory_gib: float = 0.0
    shm_gib: float | None = None
    compiler: str = ""
    c_compiler: str = ""
    has_headers: bool = True
    cuda: str = ""
    hip: str = ""
    driver: str = ""
    nccl: tuple[int, ...] | None = None
    gpus: list[Gpu] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    topology: str = ""
    is_exclusive: bool = False
    interfaces: dict[str, bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def runs_triton(self) -> bool:
        """Whether a kernel of Triton can be launched, as far as it takes the host."""
        return "triton" in self.packages and bool(self.c_compiler) and self.has_headers

    def save(self, path: Path) -> None:
        """Write it for other processes, all of it or nothing."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.rename(path)

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read what :meth:`save` wrote."""
        facts = json.loads(path.read_text(encoding="utf-8"))
        gpus = [Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in facts["gpus"]]
        nccl = None if facts["nccl"] is None else tuple(facts["nccl"])
        return cls(**{**facts, "gpus": gpus, "nccl": nccl})


def examined_host() -> Machine:
    """Look at this machine without its GPUs; what raises is left out, and named in ``errors``."""
    return _looked_at(Machine(is_complete=False), {
        "system": platform.platform,
        "python": platform.python_version,
        "packages": _packages,
        "cpus": lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": host_memory_gib,
        "shm_gib": lambda: shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else None,
        "compiler": lambda: shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or "",
        "c_compiler": _c_compiler,
        "has_headers": _has_headers,
        "driver": _driver,
        "interfaces": lambda: {name: address_of(name) is not None for _, name in socket.if_nameindex()},
        "environment": _environment,
    })  # fmt: skip


def with_gpus_examined(host: Machine) -> Machine:
    """The same with its GPUs, which takes torch and the driver."""
    machine = _looked_at(host, {
        "cuda": lambda: _torch().version.cuda or "",
        "hip": lambda: _torch().version.hip or "",
        "gpus": _gpus,
        "nccl": _nccl,
        "peer_access": _peer_access,
        "topology": _topology,
        "is_exclusive": _is_exclusive,
    })  # fmt: skip
    return replace(machine, is_complete=True)


def _looked_at(machine: Machine, probes: Mapping[str, Callable[[], Any]]) -> Machine:
    facts: dict[str, Any] = {}
    errors = dict(machine.errors)
    for name, probe in probes.items():
        try:
            facts[name] = probe()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return replace(machine, **facts, errors=errors)


def used_interface(machine: Machine) -> str:
    """The interfaces that a run on this machine alone would use, as :func:`.interfaces.use_interface` settles it."""
    if named := machine.environment.get("GLOO_SOCKET_IFNAME"):
        return named
    return LOOPBACK if LOOPBACK in machine.interfaces else "any"


def _packages() -> dict[str, str]:
    found = installed_versions(PACKAGES)
    if "triton" not in found and importlib.util.find_spec("triton") is not None:
        found["triton"] = "of another package"
    return found


def _environment() -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    found.pop(NOT_SET_BY_USERS, None)
    return {name: "(not shown)" if name in HIDDEN else value for name, value in found.items()}


def _c_compiler() -> str:
    """As Triton looks for it."""
    if (named := os.environ.get("CC")) is not None:
        return shutil.which(named) or ""
    return shutil.which("gcc") or shutil.which("clang") or ""


def _has_headers() -> bool:
    """Where Triton looks for them."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # of Debian
    return (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists()


def _driver() -> str:
    """From what the kernel module says: it answers also where the driver does not."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return ""
    words = path.read_text().split()
    return next((word for word in words if word[0].isdigit() and "." in word), words[0])


def _torch() -> Any:
    """Imported late: what the host is like is written before."""
    return importlib.import_module("torch")


def _gpus() -> list[Gpu]:
    torch = _torch()
    if torch.cuda.device_count():
        # Until then NVML counts, which knows all GPUs of a host where CUDA shows one instance of MIG.
        torch.cuda.init()
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
    torch = _torch()
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    loaded = ctypes.c_int()
    with suppress(OSError, AttributeError):  # torch names the one that it was built with, another may have been loaded
        # Only what is loaded already: where torch has NCCL within itself, the system's is of no interest.
        ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_LAZY).ncclGetVersion(ctypes.byref(loaded))
    if loaded.value >= 10_000:  # major * 10000 + minor * 100 + patch, since 2.9
        return loaded.value // 10_000, loaded.value // 100 % 100, loaded.value % 100
    return tuple(int(part) for part in torch.cuda.nccl.version()[:3])


def _peer_access() -> list[list[bool]]:
    torch = _torch()
    count = range(torch.cuda.device_count())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in count] for i in count]


def _topology() -> str:
    return _nvidia_smi("topo", "-m") if _torch().cuda.device_count() > 1 else ""


def _is_exclusive() -> bool:
    modes = _nvidia_smi("--query-gpu=compute_mode", "--format=csv,noheader") if _torch().cuda.device_count() else ""
    return "exclusive" in modes.lower()


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; empty where it is not there or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ended = run_limited(["nvidia-smi", *arguments], log, 10)
        return _ESCAPES.sub("", log.read_text(errors="replace")).strip() if ended.code == 0 else ""
