"""What trainings run on: cores and GPUs and their share of every training, and what of all that may change a result."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("lightning-asyncpp", "torch", "lightning")
_COMPARED = ("python", *PACKAGES, "device", "threads")


def usable_cores() -> int:
    """Cores that this process may use: a container or a scheduler may allow it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def slots(
    workers: int | None, threads: int, gpus: Sequence[str], cores: Callable[[], int] = usable_cores
) -> list[dict[str, str]]:
    """The environment of every slot: one per GPU, or as many as the cores have room for.

    Args:
        workers: number of slots without GPUs; ``None``: cores divided by threads.
        threads: of every training.
        gpus: numbers of GPUs among those that this process sees, or their UUIDs; one named twice gets two slots.
        cores: counts the cores of this machine.
    """
    common = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if gpus:
        return [common | {"CUDA_VISIBLE_DEVICES": _on_machine(gpu)} for gpu in gpus]
    count = workers if workers is not None else max(1, cores() // threads)
    return [common | {"CUDA_VISIBLE_DEVICES": ""} for _ in range(count)]


def gpu_problems(gpus: Sequence[str]) -> Iterator[str]:
    """Say what is wrong with the argument ``--gpus``, which names at least one."""
    argument, available = f"--gpus={','.join(gpus)}", torch.cuda.device_count()
    unknown = [gpu for gpu in gpus if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-"))]
    missing = [gpu for gpu in gpus if gpu.isdecimal() and int(gpu) >= available]
    if unknown:
        yield f"{argument}: {', '.join(unknown)} is no GPU; give numbers, such as 0,1, or UUIDs (nvidia-smi -L)"
    if not available:
        yield f"{argument}: torch finds no GPU here"
    elif missing:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if visible is None else f" in CUDA_VISIBLE_DEVICES={visible}"
        yield f"{argument}: there are {available} GPUs{where}, counted from 0, and no {', '.join(missing)}"


def name_of(gpus: Sequence[str]) -> str | None:
    """``cpu`` without GPUs, else the name that they have in common; ``None`` if it cannot be told."""
    if not all(gpu.isdecimal() for gpu in gpus):
        return None
    names = {torch.cuda.get_device_name(int(gpu)) for gpu in gpus} if gpus else {"cpu"}
    return names.pop() if len(names) == 1 else None


def _on_machine(gpu: str) -> str:
    """A number among the GPUs that this process sees -> what they call it who see all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpu if visible is None or not gpu.isdecimal() else visible.split(",")[int(gpu)].strip()


def versions(device: str | None, threads: int) -> dict[str, str]:
    """Versions of what decides a result, and what it is computed on; ``stdlib`` data is the running Python's.

    Args:
        device: as :func:`device_name` has it; ``None``: not known.
        threads: that PyTorch uses.
    """
    found = {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES}
    return found | ({} if device is None else {"device": device}) | {"threads": str(threads)}


def device_name(device: torch.device) -> str:
    """``cpu``, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def mixture(finished: Collection[Mapping[str, str]], now: Mapping[str, str]) -> str | None:
    """Say in what finished runs differ among each other or from those to come; ``None``: in nothing that is known.

    Args:
        finished: the :func:`versions` of every run; older runs lack some.
        now: those of a run that would be started now; empty if there is none.
    """
    parts = []
    for name in _COMPARED:
        runs = Counter(known[name] for known in finished if name in known)
        if runs and len(runs.keys() | {now.get(name, next(iter(runs)))}) > 1:
            values = [f"{value} ({count} {'run' if count == 1 else 'runs'})" for value, count in sorted(runs.items())]
            parts.append(", ".join([f"{name} {values[0]}", *values[1:]]) + (f", now {now[name]}" if now else ""))
    if not parts:
        return None
    return (
        f"the runs of this table are not all alike: {'; '.join(parts)}. Their losses may differ for that alone; to"
        " compare like with like, train all of them with one of these: give another --output"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
