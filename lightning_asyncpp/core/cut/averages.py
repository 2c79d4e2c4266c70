"""Averages of a model's weights, which are cut like the model.

An average is updated by pairing its parameters with the model's parameters, in order. If only the model were cut,
layers would be averaged with different layers, without an error if their shapes agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.pruned import Pruned

_UPDATES = ("update_parameters", "update")


class Averages:
    """Averages of a model, in the module around it and in callbacks; create this object before the cut.

    Args:
        model: model that will be cut.
        root: module around the model.
        others: averages of the model or of ``root`` that are not in ``root``, such as a callback's.
    """

    def __init__(self, model: nn.Module, root: nn.Module | None, others: Iterable[AveragedModel] = ()) -> None:
        self._model = model = called_by_steps(model)
        self._root = root
        signature = _signature(model)
        names = {} if root is None else dict(root.named_modules())
        inside = [f"{n}.module" for n, m in names.items() if m is not model and _averages(m, model, signature)]
        own = [n for n, m in names.items() if m is model]
        self.networks = [names[name] for name in inside]
        for other in others:
            if _is_alike(other.module, model, signature):
                self.networks.append(other.module)
            elif type(other.module) is type(root):
                self.networks += [other.module.get_submodule(name) for name in (*own, *inside)]
        for network in self.networks:
            network.requires_grad_(False)  # averages are not trained

    def cut(self, pruned: Pruned) -> None:
        """Prune the averages like the model."""
        for network in self.networks:
            inside = self._root is not None and any(module is network for module in self._root.modules())
            pruned.prune_alike(self._root if inside and self._root is not None else network, network, self._model)

    def fill(self) -> None:
        """Replace the averages' meta tensors by copies of the model's tensors."""
        for network in self.networks:
            for own, copy in zip(self._model.modules(), network.modules()):
                for kind in ("named_parameters", "named_buffers"):
                    for name, tensor in getattr(copy, kind)(recurse=False):
                        if tensor.is_meta:
                            value = getattr(own, name).detach().clone()
                            is_parameter = isinstance(tensor, nn.Parameter)
                            setattr(copy, name, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def averages_in(holders: Iterable[Any]) -> Iterator[AveragedModel]:
    """Yield the averages among the attributes of objects, such as callbacks."""
    for holder in holders:
        yield from (value for value in vars(holder).values() if isinstance(value, AveragedModel))


def _averages(module: nn.Module, model: nn.Module, signature: list[Any]) -> bool:
    """Return whether the attribute ``module`` of a module is an average of the model, as in torch and timm."""
    network = getattr(module, "module", None)
    known = isinstance(module, AveragedModel) or any(callable(getattr(module, name, None)) for name in _UPDATES)
    return known and isinstance(network, nn.Module) and _is_alike(network, model, signature)


def _is_alike(module: nn.Module, model: nn.Module, signature: list[Any]) -> bool:
    return module is not model and type(module) is type(model) and bool(signature) and _signature(module) == signature


def _signature(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in module.named_parameters() if not isinstance(p, UninitializedParameter)]
