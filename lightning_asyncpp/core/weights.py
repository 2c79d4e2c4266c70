"""Weight versions of a stage, and the sums of their gradients.

Each version has separate leaf tensors, on which forwards and backwards run. The optimizer's parameters share the memory
of the newest version. Replacing the data of a single set of leaves while a graph is alive would silently mix versions.

With a compute dtype, the versions have this dtype, and the optimizer's parameters are masters (fp32 weights that the
optimizer updates). After a step, the newest version is written from the masters. Gradients are summed over microbatches
in the masters' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_asyncpp.core import foreach
from lightning_asyncpp.errors import ConfigurationError


class Weights(Protocol):
    """Weights of the stages in this process: :class:`WeightVersions` of one, :class:`.AllWeights` of several."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]

    @property
    def newest(self) -> int:
        """Newest version that all stages have."""

    def for_evaluation(self) -> dict[str, Tensor] | None:
        """Return the leaf tensors of the newest version; None if they are the module's parameters."""

    def older(self) -> dict[str, Tensor]:
        """Return the weights of the version before the newest, where there are two."""

    def masters(self) -> dict[str, Tensor]:
        """Return the masters by name; empty without masters."""

    def restore(self, newest: int, older: Mapping[str, Tensor] = {}, masters: Mapping[str, Tensor] = {}) -> None:
        """Set version ``newest`` from the parameters, the version before it from ``older``, and then the masters."""

    def adopt(self, unseen: bool = False) -> None:
        """Copy changes of the parameters since the last update into the newest version."""

    def release_masters(self) -> None:
        """Replace masters in the module by the newest weights."""

    def to_host(self) -> None:
        """Move all versions to the host."""


class WeightVersions:
    """Weights W_v (before update v) of one stage, at most N = ``num_versions`` versions: version v is at place v % N.

    Args:
        parameters: name -> parameter of the optimizer; frozen parameters have no versions and are ignored.
        num_versions: maximum number of versions: 2 if gradients on this stage are delayed, else 1.
        uses: name of a shared parameter in a later layer -> its name in ``parameters``. Each name has a separate leaf
            with the same memory, so that gradients are summed in the same order whether the layers are on one stage or
            on several.
        buffers: name -> buffer that changes with updates, and so is part of each version.
        compute_dtype: dtype of the versions, with the parameters as masters; default: there are no masters, and the
            parameters are the newest version.

    Attributes:
        has_masters: whether the parameters are masters.
        used_twice: names of the parameters with several leaves.
        masters_hold_weights: whether rounding the masters gives the weights; with Error Feedback it does not.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        num_versions: int,
        uses: Mapping[str, str] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.buffers = dict(buffers or {})
        self.num_versions = num_versions
        self.compute_dtype = compute_dtype
        self.newest = 0
        self._uses = {use: name for use, name in (uses or {}).items() if name in self.parameters}
        self.used_twice = frozenset(self._uses.values())
        self._uses_of: dict[str, list[str]] = {}
        for use, name in self._uses.items():
            self._uses_of.setdefault(name, []).append(use)
        self.has_masters = compute_dtype is not None
        self._versions = [self._new_version(copied=place > 0) for place in range(num_versions)]
        # Name of a leaf -> sum of its gradients in the masters' dtype.
        self._sums: dict[str, Tensor] = {}
        self._summed_at = 0  # without masters: place of the version whose leaves hold the gradients so far
        self._released: dict[str, Tensor] = {}
        self.masters_hold_weights = True
        self._master_writes = self._writes_to_masters()
        if self.has_masters:
            self._sum_gradients_of_leaves()

    def leaves(self, version: int) -> dict[str, Tensor]:
        """Return the leaf tensors of a version: of the newest or, with room for two, of the version before it."""
        if not self.newest - self.num_versions < version <= self.newest:
            alive = f"the newest of {self.num_versions} is {self.newest}"
            raise RuntimeError(f"weight version {version} is not alive: {alive}")
        return self._versions[version % self.num_versions]

    def leaves_for_backward(self, version: int) -> dict[str, Tensor]:
        """Return the leaf tensors of a version, after moving the gradients summed so far to them."""
        leaves, place = self.leaves(version), version % self.num_versions
        if place != self._summed_at:
            before, self._summed_at = self._versions[self._summed_at], place
            for name in (*self.parameters, *self._uses):
                leaves[name].grad, before[name].grad = before[name].grad, None
        return leaves

    def take_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients summed so far, and reset the sums."""
        leaves = self._versions[self._summed_at]
        gradients: dict[str, Tensor | None] = {}
        for name in self.parameters:
            summed = self._sums.get(name) if self.has_masters else leaves[name].grad
            gradients[name] = sum_of(self.gradients_apart(name)) if name in self.used_twice else summed
        for leaf in leaves.values():
            leaf.grad = None
        self._sums.clear()
        return gradients

    def gradients_apart(self, name: str) -> list[Tensor]:
        """Return the summed gradient of each use of a parameter, from the last layer to the first.

        The caller adds them in this order. So do stages that share a parameter, since the last stage completes its
        gradient first.
        """
        uses = [name, *self._uses_of.get(name, ())]
        gradients = [self.gradient(use) for use in reversed(uses)]
        return [gradient for gradient in gradients if gradient is not None]

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a leaf, summed so far."""
        return self._sums.get(name) if self.has_masters else self._versions[self._summed_at][name].grad

    def copies_of_masters(self) -> dict[nn.Parameter, Tensor] | None:
        """Return parameter -> tensor of the newest version, to be written after a step; None without masters."""
        if not self.has_masters:
            return None
        newest = self.leaves(self.newest)
        return {parameter: newest[name].data for name, parameter in self.parameters.items()}

    def for_evaluation(self) -> dict[str, Tensor] | None:
        """Return the leaf tensors of the newest version; None if they are the module's parameters."""
        return self.leaves(self.newest) if self.has_masters else None

    def advance(self) -> dict[nn.Parameter, Tensor] | None:
        """Add version W_{v+1} before the optimizer's step: a copy of W_v or, with room for one version, W_v itself.

        Returns:
            Parameter -> its weights W_v, from now on the older version; None with room for one version, or with
            masters.
        """
        self.newest += 1
        if self.num_versions == 1:
            return None
        before, after = self.leaves(self.newest - 1), self.leaves(self.newest)
        with torch.no_grad():
            owned = [*self.parameters, *self.buffers]
            if owned:
                foreach.copy_([after[name] for name in owned], [before[name] for name in owned])
        self._show_newest()
        return None if self.has_masters else {p: before[name] for name, p in self.parameters.items()}

    def older(self) -> dict[str, Tensor]:
        """Return weights and buffers of the version before the newest by name; empty if there is only one version."""
        if self.num_versions == 1 or self.newest == 0:
            return {}
        older = self.leaves(self.newest - 1)
        return {name: leaf.detach() for name, leaf in older.items() if name not in self._uses}

    def masters(self) -> dict[str, Tensor]:
        """Return the masters by name; empty without masters."""
        if not self.has_masters:
            return {}
        return self._released or {name: p.detach() for name, p in self.parameters.items()}

    def release_masters(self) -> None:
        """Replace masters in the module by the newest version's weights, except masters that round to these weights.

        With Error Feedback, masters do not round to the weights. Masters are kept for checkpoints after the run.
        """
        if not self.has_masters or self._released:
            return
        self._released = {name: p.data for name, p in self.parameters.items()}
        for name, weights in self.leaves(self.newest).items():
            parameter = self.parameters.get(name)
            if parameter is not None and not torch.equal(parameter.data.to(weights.dtype), weights):
                parameter.data = weights.detach().to(parameter.dtype)

    def to_host(self) -> None:
        """Move all versions to the host; call this after the module has moved and all work has ended."""
        for version in self._versions:
            for leaf in version.values():
                leaf.data = leaf.detach().cpu()
        self._released = {name: tensor.cpu() for name, tensor in self._released.items()}
        self._show_newest()

    def restore(self, newest: int, older: Mapping[str, Tensor] = {}, masters: Mapping[str, Tensor] = {}) -> None:
        """Set version ``newest`` from the loaded parameters and buffers, and the version before it from ``older``.

        Without ``older`` both versions are equal. Then ``masters``, if used, are copied into the parameters; parameters
        without an entry keep the loaded values.
        """
        values = {name: tensor.detach().clone() for name, tensor in self._owned()}
        self.newest = newest
        with torch.no_grad():
            for version in range(max(0, newest - self.num_versions + 1), newest + 1):
                source = older if older and version < newest else values
                for name, _ in self._owned():
                    self.leaves(version)[name].copy_(source[name])
            for name, value in masters.items() if self.has_masters else ():
                self.parameters[name].copy_(value)
        self._show_newest()
        self.note_step()

    def note_step(self) -> None:
        """Record that the optimizer has stepped, so that :meth:`adopt` finds later writes."""
        if self.has_masters:
            self._master_writes = self._writes_to_masters()

    @torch.no_grad()
    def adopt(self, unseen: bool = False) -> None:
        """Copy changes of the parameters since the last update into the newest version.

        Args:
            unseen: whether masters may have changed while their version counters did not.

        Raises:
            ConfigurationError: the parameters are masters that do not hold the weights, and were changed.
        """
        newest = self.leaves(self.newest)
        if not self.has_masters:
            for name, parameter in self.parameters.items():
                if parameter.data_ptr() != newest[name].data_ptr():  # its data has been replaced
                    newest[name].copy_(parameter.detach())
                    parameter.data = newest[name].data
        elif self._writes_to_masters() != self._master_writes or (unseen and self.masters_hold_weights):
            if not self.masters_hold_weights:
                raise ConfigurationError(
                    "weights were changed outside the optimizer's step, but with weight_dtype='bf16' and this optimizer"
                    " the module's parameters are not the weights, only masters of them; leave weight_dtype out"
                )
            if self.parameters:
                masters = [parameter.detach() for parameter in self.parameters.values()]
                foreach.copy_([newest[name] for name in self.parameters], masters)
            self.note_step()

    def _writes_to_masters(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self.parameters.items()} if self.has_masters else {}

    def _owned(self) -> list[tuple[str, Tensor]]:
        return [*self.parameters.items(), *self.buffers.items()]

    def _new_version(self, copied: bool) -> dict[str, Tensor]:
        """Return the leaves of a version: copies, or tensors that share memory with the parameters and buffers."""
        tensors = {name: p.data.clone() if copied else p.data for name, p in self._owned()}
        if self.has_masters:
            tensors |= {name: p.data.to(self.compute_dtype, copy=True) for name, p in self.parameters.items()}
        leaves = {name: _leaf(tensors[name]) for name in self.parameters}
        leaves |= {use: _leaf(tensors[name]) for use, name in self._uses.items()}
        return leaves | {name: tensors[name].detach() for name in self.buffers}

    def _show_newest(self) -> None:
        """Point the module's buffers, and its parameters unless they are masters, at the newest version's memory."""
        newest = self.leaves(self.newest)
        for name, tensor in self.buffers.items() if self.has_masters else self._owned():
            tensor.data = newest[name].data

    def _sum_gradients_of_leaves(self) -> None:
        dtypes = {name: p.dtype for name, p in self.parameters.items()}
        dtypes |= {use: dtypes[name] for use, name in self._uses.items()}
        for version in self._versions:
            for name, dtype in dtypes.items():
                take = functools.partial(_take_gradient, self._sums, name, dtype)
                version[name].register_post_accumulate_grad_hook(take)


def _take_gradient(sums: dict[str, Tensor], name: str, dtype: torch.dtype, leaf: Tensor) -> None:
    """Move a leaf's gradient into the sum in the masters' dtype."""
    assert leaf.grad is not None
    gradient, leaf.grad = leaf.grad, None
    if name in sums:
        sums[name].add_(gradient)
    else:
        sums[name] = gradient.to(dtype)


def sum_of(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of gradients from left to right; None if there are none."""
    return functools.reduce(torch.add, gradients) if gradients else None


def _leaf(data: Tensor) -> Tensor:
    return data.detach().requires_grad_()
