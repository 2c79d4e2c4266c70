"""The two weight versions of PipeDream-2BW, and the gradients taken at them.

Each version is a set of leaf tensors of its own, on which forwards and backwards run; the optimizer's parameters always
point at the newest version. Re-pointing the data of one set under a live graph instead would silently mix versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline import foreach
from lightning_asyncpp.pipeline.errors import ConfigurationError


class WeightVersions:
    """Weights W_v of one stage, with room for ``room`` versions: v lives in slot v % room.

    Args:
        parameters: name -> the parameter that the optimizer holds; frozen ones are left out, they have no versions.
        room: 2 with a delay of one update, 1 without.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], room: int) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.room = room
        self.newest = 0
        self._slots: list[dict[str, Tensor]] = [{name: _leaf(p.data) for name, p in self.parameters.items()}]
        for _ in range(room - 1):
            self._slots.append({name: _leaf(p.detach().clone()) for name, p in self.parameters.items()})
        self._writes = [_writes(slot) for slot in self._slots]

    def leaves(self, version: int) -> dict[str, Tensor]:
        """Leaf tensors of version ``version``, the newest or (with room for it) the one before."""
        if not self.newest - self.room < version <= self.newest:
            raise RuntimeError(f"weight version {version} is not alive: the newest of {self.room} is {self.newest}")
        return self._slots[version % self.room]

    def take_gradients(self, version: int) -> dict[str, Tensor | None]:
        """Hand over the gradients summed at a version so far and start its sum anew; see :meth:`check_unwritten`."""
        self.check_unwritten(version)
        gradients = {}
        for name, leaf in self.leaves(version).items():
            gradients[name] = leaf.grad
            leaf.grad = None
        return gradients

    def advance(self) -> dict[nn.Parameter, Tensor] | None:
        """Make W_{v+1}, equal to the newest W_v, the newest version: the optimizer then steps on it.

        Returns:
            parameter -> its weights W_v, which stay alive as the older version; None with room for one version.
        """
        self.newest += 1
        if self.room == 1:
            return None
        before, after = self._slots[(self.newest - 1) % self.room], self._slots[self.newest % self.room]
        with torch.no_grad():
            foreach.copy_(list(after.values()), list(before.values()))
            for name, parameter in self.parameters.items():
                parameter.data = after[name].data
        self._writes[self.newest % self.room] = _writes(after)
        return {parameter: before[name] for name, parameter in self.parameters.items()}

    def older(self) -> dict[str, Tensor] | None:
        """Weights of the version before the newest, name -> tensor; None if there is only one."""
        if self.room == 1 or self.newest == 0:
            return None
        return {name: leaf.detach() for name, leaf in self._slots[(self.newest - 1) % self.room].items()}

    def restore(self, newest: int, older: Mapping[str, Tensor] | None) -> None:
        """Take the parameters, as they were just loaded, for version ``newest``, and ``older`` for the one before."""
        values = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.newest = newest
        with torch.no_grad():
            for version in range(max(0, newest - self.room + 1), newest + 1):
                source = older if older is not None and version < newest else values
                for name, leaf in self._slots[version % self.room].items():
                    leaf.copy_(source[name])
            for name, parameter in self.parameters.items():
                parameter.data = self._slots[newest % self.room][name].data
        self._writes = [_writes(slot) for slot in self._slots]

    def check_unwritten(self, version: int) -> None:
        """Raise ConfigurationError if a forward wrote into the weights of a version, of which there is a newer one."""
        if self.room == 1:
            return  # what a forward writes, the optimizer finds
        known, now = self._writes[version % self.room], _writes(self.leaves(version))
        if written := [name for name in known if now[name] != known[name]]:
            raise ConfigurationError(
                f"{', '.join(written[:5])}: changed in place by a forward, which runs on older weights, so the change"
                " would be lost; change weights in on_train_batch_end instead (torch.nn.Embedding: leave max_norm out)"
            )


def lent(optimizer: Any, weights: Mapping[nn.Parameter, Tensor] | None) -> AbstractContextManager[None]:
    """Lend the weights before a step, which are alive as the older version, to an optimizer that wants to compare.

    Args:
        optimizer: one with ``weights_before(weights)`` would copy them otherwise; any other needs nothing.
        weights: parameter -> its weights before the step; None or empty: there is no older version.
    """
    lend = getattr(optimizer, "weights_before", None)
    return lend(weights) if callable(lend) and weights else nullcontext()


def leave_out(optimizer: Any) -> None:
    """Tell an optimizer that wants to know that one update is left out: the weights stay as they are for a version."""
    if callable(skip := getattr(optimizer, "skip_update", None)):
        skip()


def _writes(leaves: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each was written to in place."""
    return {name: leaf._version for name, leaf in leaves.items()}


def _leaf(data: Tensor) -> Tensor:
    return data.detach().requires_grad_()
