"""Random numbers: derived seeds, and the generators' states in checkpoints.

A microbatch's seeds are derived from (seed, purpose, replica, microbatch, layer) and not from the rank. So dropout does
not depend on the number of stages, the first and the last stage draw the same numbers from torch in the user's step,
and a resumed run draws the same numbers as an uninterrupted run. The seeds of updates also depend on the stage. Random
numbers without a derived seed come from the generators of Python, NumPy and torch, whose states are in checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_of_run() -> int:
    """Return the seed that ``seed_everything`` set, else a random seed, which callers must make equal on all ranks."""
    return int(os.environ.get("PL_GLOBAL_SEED", secrets.randbelow(2**31)))


def seed_generators(seed: int, device: torch.device, *parts: int | str) -> int:
    """Seed torch's default generators of the CPU and of ``device``.

    ``torch.manual_seed`` is too slow for every layer of every microbatch: it formats a stack trace, in about a
    millisecond, for each type of accelerator that is not initialised.

    Args:
        seed: seed of the run.
        device: device whose generator is seeded besides the CPU's.
        parts: purpose, replica, microbatch and the like; the derived seed depends on ``seed`` and these parts.

    Returns:
        Derived seed, of 63 bits.
    """
    text = ":".join(map(str, (seed, *parts)))
    derived = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    if device.type not in ("cpu", "cuda", "meta"):
        torch.manual_seed(derived)
        return derived
    torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(derived)
    return derived


def generator_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of torch's default generators of the CPU and of ``device`` (None for a CPU)."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_generator_states(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Restore the states that :func:`generator_states` returned."""
    cpu_state, cuda_state = states
    torch.set_rng_state(cpu_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore torch's default generators of the CPU and of ``device`` at the end."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)


class drawing_from:  # noqa: N801 - used like a function; a `@contextmanager` generator would cost more per update
    """Seed the generators of torch, NumPy and Python, and restore their states at the end.

    The arguments are those of :func:`seed_generators`.
    """

    def __init__(self, seed: int, device: torch.device, *parts: int | str) -> None:
        self._seed, self._device, self._parts = seed, device, parts

    def __enter__(self) -> None:
        self._torch, self._python = generator_states(self._device), random.getstate()
        self._numpy = np.random.get_state()
        derived = seed_generators(self._seed, self._device, *self._parts)
        random.seed(derived)
        np.random.seed(derived % 2**32)

    def __exit__(self, *_: object) -> None:
        set_generator_states(self._torch, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def seeded(seed: int, device: torch.device, *parts: int | str) -> Iterator[None]:
    """Seed torch's default generators by :func:`seed_generators`, and restore their states at the end."""
    with preserved_generators(device):
        seed_generators(seed, device, *parts)
        yield


def random_states() -> dict[str, Any]:
    """Return the states of the default generators of Python, NumPy and torch."""
    version, own, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        # Stored as tensors, since otherwise hundreds of numbers per rank would be unpickled one by one.
        "python": (version, torch.tensor(own), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore :func:`random_states`; GPUs keep their states if the number of GPUs differs."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(int(key) for key in keys), gauss))
    kind, numbers, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
