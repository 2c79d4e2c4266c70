"""Random numbers: seeds derived from what is computed, and generators' states as a checkpoint holds them.

Every seed comes from (seed, purpose, replica, micro-batch, layer), not from who computes it: dropout does not depend on
the number of stages, first and last stage see the same masks in user code, and a resumed run draws what an
uninterrupted one drew. What a process draws beside that comes from the generators of Python, NumPy and torch.
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


def derive(seed: int, *parts: int | str) -> int:
    """A 63-bit seed from the run's seed and what it is for."""
    text = ":".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_of_run() -> int:
    """The seed of ``seed_everything``, or a new one if there is none; ranks that need the same one must agree on it."""
    return int(os.environ.get("PL_GLOBAL_SEED", secrets.randbelow(2**31)))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of ``device``, as ``torch.manual_seed`` does for all devices.

    That function formats a whole stack trace for every kind of accelerator that is not initialised, about a
    millisecond each: too slow for every layer of every micro-batch.
    """
    if device.type not in ("cpu", "cuda", "meta"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def generator_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """States of torch's default generators of the CPU and of ``device``, if that is another one."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_generator_states(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Set what :func:`generator_states` returned."""
    cpu_state, cuda_state = states
    torch.set_rng_state(cpu_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Leave torch's default generators of the CPU and of ``device`` as they were."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)


class CallersGenerators:
    """Torch's generators as the caller of an engine has them, while layers draw from seeds of their own.

    Args:
        device: whose generators, beside those of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: tuple[Tensor, Tensor | None] | None = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Leave the generators as they were, whatever runs inside."""
        self._states = generator_states(self._device)
        try:
            yield
        finally:
            set_generator_states(self._states, self._device)
            self._states = None

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Run the caller's own code, such as the optimizer's step, inside of :meth:`set_aside`."""
        if self._states is None:
            yield
            return
        set_generator_states(self._states, self._device)
        try:
            yield
        finally:
            self._states = generator_states(self._device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run under torch's default generators seeded with ``seed``, and put their states back afterwards."""
    with preserved_generators(device):
        seed_generators(seed, device)
        yield


def random_states() -> dict[str, Any]:
    """The states of the generators that this process draws from when nobody gives it another one."""
    version, own, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        # As tensors: hundreds of numbers would be unpickled one by one, for every rank.
        "python": (version, torch.tensor(own), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Let this process go on drawing from what :func:`random_states` returned; devices that it did not have stay."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(int(key) for key in keys), gauss))
    kind, numbers, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let torch, numpy and Python draw from ``seed`` meanwhile, and go on afterwards as if nothing had been drawn."""
    states = random_states()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_states(states)
