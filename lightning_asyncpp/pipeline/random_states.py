"""The random numbers of a process: Python's, NumPy's and torch's generators, as a checkpoint holds them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


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
