"""The two weight versions of PipeDream-2BW, and the gradients taken at them.

Each version is a set of leaf tensors of its own, on which forwards and backwards run; the optimizer's parameters always
point at the newest version. Re-pointing the data of one set under a live graph instead would silently mix versions.

With a compute dtype the versions are kept in it, and the optimizer's parameters are masters beside them, in their own
dtype: after a step the newest version is written from them. Gradients are then summed over microbatches in the
masters' dtype, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.host_copies import on_host
from lightning_asyncpp.errors import ConfigurationError


class WeightVersions:
    """Weights W_v of one stage, with room for ``room`` versions: v lives in slot v % room.

    Args:
        parameters: name -> the parameter that the optimizer holds; frozen ones are left out, they have no versions.
        room: 2 with a delay of one update, 1 without.
        uses: name of a second (third, ...) layer's use of a parameter -> the parameter's name. Every use has a leaf of
            its own, with the same memory: so gradients are summed in the same order whether or not the layers live on
            one stage.
        buffers: name -> buffer that changes with an update, and so belongs to a version.
        compute_dtype: of the versions, with the parameters as masters; None: the parameters are the newest version.

    Attributes:
        has_masters: whether the parameters are masters beside the versions.
        used_twice: names of the parameters that have several leaves.
        masters_hold_weights: whether masters are the weights, in their own dtype; a correction may keep them elsewhere.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        room: int,
        uses: Mapping[str, str] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.buffers = dict(buffers or {})
        self.room = room
        self.compute_dtype = compute_dtype
        self.newest = 0
        self._uses = {use: name for use, name in (uses or {}).items() if name in self.parameters}
        self.used_twice = frozenset(self._uses.values())
        self._uses_of: dict[str, list[str]] = {}
        for use, name in self._uses.items():
            self._uses_of.setdefault(name, []).append(use)
        self.has_masters = compute_dtype is not None
        self._slots = [self._slot(copied=False)] + [self._slot(copied=True) for _ in range(room - 1)]
        # Name of a leaf -> its gradients, summed in the masters' dtype.
        self._sums: dict[str, Tensor] = {}
        self._summed_at = 0  # slot whose leaves hold the gradients so far, without masters
        self._released: dict[str, Tensor] = {}
        self.masters_hold_weights = True
        self._master_writes = self._writes_to_masters()
        if self.has_masters:
            self._sum_gradients_of_leaves()

    def leaves(self, version: int) -> dict[str, Tensor]:
        """Leaf tensors of version ``version``, the newest or (with room for it) the one before."""
        if not self.newest - self.room < version <= self.newest:
            raise RuntimeError(f"weight version {version} is not alive: the newest of {self.room} is {self.newest}")
        return self._slots[version % self.room]

    def sum_at(self, version: int) -> dict[str, Tensor]:
        """Leaf tensors of a version, whose backward adds to the gradients so far, whichever version these are of."""
        leaves, slot = self.leaves(version), version % self.room
        if slot != self._summed_at:
            before, self._summed_at = self._slots[self._summed_at], slot
            for name in (*self.parameters, *self._uses):
                leaves[name].grad, before[name].grad = before[name].grad, None
        return leaves

    def take_gradients(self) -> dict[str, Tensor | None]:
        """Hand over the gradients summed so far and start the sum anew."""
        leaves = self._slots[self._summed_at]
        gradients: dict[str, Tensor | None] = {}
        for name in self.parameters:
            summed = self._sums.get(name) if self.has_masters else leaves[name].grad
            gradients[name] = sum_of(self.gradients_apart(name)) if name in self.used_twice else summed
        for leaf in leaves.values():
            leaf.grad = None
        self._sums.clear()
        return gradients

    def gradients_apart(self, name: str) -> list[Tensor]:
        """The gradients of a parameter's uses that there are, summed so far; the last layer's first.

        In this order they are added, and not the other way round: so do stages that share a parameter, the last of
        which is the first to have its gradient.
        """
        uses = [name, *self._uses_of.get(name, ())]
        gradients = [self.gradient(use) for use in reversed(uses)]
        return [gradient for gradient in gradients if gradient is not None]

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of a leaf that was summed so far."""
        return self._sums.get(name) if self.has_masters else self._slots[self._summed_at][name].grad

    def compute_weights(self) -> dict[nn.Parameter, Tensor] | None:
        """Parameter -> where the optimizer's step is to write the newest version; None without masters."""
        if not self.has_masters:
            return None
        slot = self._slots[self.newest % self.room]
        return {parameter: slot[name].data for name, parameter in self.parameters.items()}

    def for_evaluation(self) -> dict[str, Tensor] | None:
        """Leaf tensors of the newest version where they are not the module's own."""
        return self.leaves(self.newest) if self.has_masters else None

    def shown(self) -> dict[str, Tensor]:
        """Return the master weights of the newest version by name; none if the module holds them itself."""
        if not self.has_masters:
            return {}
        leaves = self.leaves(self.newest)
        return {name: leaves[name].detach() for name in (*self.parameters, *self._uses)}

    def advance(self) -> dict[nn.Parameter, Tensor] | None:
        """Make W_{v+1}, equal to the newest W_v, the newest version: the optimizer then steps on it.

        Returns:
            parameter -> its weights W_v, which stay alive as the older version; None with room for one version, and
            with masters.
        """
        self.newest += 1
        if self.room == 1:
            return None
        before, after = self._slots[(self.newest - 1) % self.room], self._slots[self.newest % self.room]
        with torch.no_grad():
            owned = [*self.parameters, *self.buffers]
            if owned:
                foreach.copy_([after[name] for name in owned], [before[name] for name in owned])
        self._show_newest()
        return None if self.has_masters else {p: before[name] for name, p in self.parameters.items()}

    def older(self) -> dict[str, Tensor] | None:
        """Weights of the version before the newest, name -> tensor; None if there is only one."""
        if self.room == 1 or self.newest == 0:
            return None
        slot = self._slots[(self.newest - 1) % self.room]
        return {name: leaf.detach() for name, leaf in slot.items() if name not in self._uses}

    def masters(self) -> dict[str, Tensor] | None:
        """The parameters, name -> tensor, where they are masters."""
        if not self.has_masters:
            return None
        return self._released or {name: p.detach() for name, p in self.parameters.items()}

    def release_masters(self) -> None:
        """Let the module have the weights that were trained and validated, where they are not its masters, rounded.

        Error Feedback moves masters along another trajectory. They are kept for who saves the run afterwards.
        """
        if not self.has_masters or self._released:
            return
        self._released = {name: p.data for name, p in self.parameters.items()}
        for name, weights in self.leaves(self.newest).items():
            parameter = self.parameters.get(name)
            if parameter is not None and not torch.equal(parameter.data.to(weights.dtype), weights):
                parameter.data = weights.detach().to(parameter.dtype)

    def to_host(self) -> None:
        """Bring all versions to the host, where the module is by now: nothing is computed on them any more."""
        for slot in self._slots:
            for leaf in slot.values():
                leaf.data = on_host(leaf)
        self._released = {name: on_host(tensor) for name, tensor in self._released.items()}
        self._show_newest()

    def restore(
        self, newest: int, older: Mapping[str, Tensor] | None, masters: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take the parameters and buffers, as they were just loaded, for version ``newest``, ``older`` for the last.

        With masters, these are put into the parameters afterwards; without a value they are that version.
        """
        values = {name: tensor.detach().clone() for name, tensor in self._owned()}
        self.newest = newest
        with torch.no_grad():
            for version in range(max(0, newest - self.room + 1), newest + 1):
                source = older if older is not None and version < newest else values
                for name, _ in self._owned():
                    self._slots[version % self.room][name].copy_(source[name])
            for name, value in (masters or {}).items() if self.has_masters else ():
                self.parameters[name].copy_(value)
        self._show_newest()
        self.note_step()

    def note_step(self) -> None:
        """The optimizer has stepped: from now on others write."""
        if self.has_masters:
            self._master_writes = self._writes_to_masters()

    @torch.no_grad()
    def adopt(self, unseen: bool = False) -> None:
        """Make what others put into the parameters since the last update part of the newest version.

        Args:
            unseen: somebody may have written into them in a way that their version counters do not show.

        Raises:
            ConfigurationError: they are masters that do not hold the weights.
        """
        newest = self._slots[self.newest % self.room]
        if not self.has_masters:
            for name, parameter in self.parameters.items():
                if parameter.data_ptr() != newest[name].data_ptr():  # other memory was put in
                    newest[name].copy_(parameter.detach())
                    parameter.data = newest[name].data
        elif self._writes_to_masters() != self._master_writes or (unseen and self.masters_hold_weights):
            if not self.masters_hold_weights:
                raise ConfigurationError(
                    "weights were changed outside the optimizer's step: with weight_dtype='bf16' and this optimizer the"
                    " parameters are masters on another trajectory, and not the weights; leave weight_dtype out"
                )
            if self.parameters:
                masters = [parameter.detach() for parameter in self.parameters.values()]
                foreach.copy_([newest[name] for name in self.parameters], masters)
            self.note_step()

    def _writes_to_masters(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self.parameters.items()} if self.has_masters else {}

    def _owned(self) -> list[tuple[str, Tensor]]:
        return [*self.parameters.items(), *self.buffers.items()]

    def _slot(self, copied: bool) -> dict[str, Tensor]:
        """Leaves of a version: with the memory of the parameters and buffers, or with a copy of it."""
        slot = {name: p.data.clone() if copied else p.data for name, p in self._owned()}
        if self.has_masters:
            slot |= {name: p.data.to(self.compute_dtype, copy=True) for name, p in self.parameters.items()}
        leaves = {name: _leaf(slot[name]) for name in self.parameters}
        leaves |= {use: _leaf(slot[name]) for use, name in self._uses.items()}
        return leaves | {name: slot[name].detach() for name in self.buffers}

    def _show_newest(self) -> None:
        """Let the module's parameters, unless they are masters, and buffers have the memory of the newest version."""
        newest = self._slots[self.newest % self.room]
        for name, tensor in self.buffers.items() if self.has_masters else self._owned():
            tensor.data = newest[name].data

    def _sum_gradients_of_leaves(self) -> None:
        dtypes = {name: p.dtype for name, p in self.parameters.items()}
        dtypes |= {use: dtypes[name] for use, name in self._uses.items()}
        for slot in self._slots:
            for name, dtype in dtypes.items():
                take = functools.partial(_take_gradient, self._sums, name, dtype)
                slot[name].register_post_accumulate_grad_hook(take)


def _take_gradient(sums: dict[str, Tensor], name: str, dtype: torch.dtype, leaf: Tensor) -> None:
    """Add the gradient that a backward has just left on a leaf to the sum in a wider dtype."""
    assert leaf.grad is not None
    gradient, leaf.grad = leaf.grad, None
    if name in sums:
        sums[name].add_(gradient)
    else:
        sums[name] = gradient.to(dtype)


def sum_of(gradients: Sequence[Tensor]) -> Tensor | None:
    """Their sum from left to right; None if there are none."""
    return functools.reduce(torch.add, gradients) if gradients else None


def _leaf(data: Tensor) -> Tensor:
    return data.detach().requires_grad_()
