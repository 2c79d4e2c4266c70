"""What besides the recipe may change the result of a training, and whether the runs of a table differ in it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("lightning-asyncpp", "torch", "lightning")
_COMPARED = ("python", *PACKAGES, "device", "threads")


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
