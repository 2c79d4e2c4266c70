"""Weights that nobody may change for a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Untouched:
    """Tells which parameters somebody has changed since :meth:`note`.

    An in-place change counts in the tensor's version, and other memory has another address. A change through ``.data``
    shows in neither: the first few times the bits are compared, too.

    Args:
        parameters: name -> parameter.
        by_content: how many times; each reads all parameters, and waits for the device once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], by_content: int = 3) -> None:
        self._parameters = parameters
        self._by_content = by_content
        self._noted: dict[str, tuple[int, int]] | None = None
        self._sums: Tensor | None = None

    def note(self) -> None:
        """From now on nobody may change them."""
        self._noted = self._marks()
        self._sums = self._checksums() if self._by_content > 0 else None
        self._by_content -= 1

    def forget(self) -> None:
        """Anybody may change them again."""
        self._noted = self._sums = None

    def changed(self) -> list[str]:
        """Names of those that were changed since :meth:`note`; none after :meth:`forget`."""
        if self._noted is None:
            return []
        marks = self._marks()
        names = [name for name, mark in self._noted.items() if marks[name] != mark]
        if names or self._sums is None:
            return names
        same = (self._checksums() == self._sums).tolist()
        return [name for name, is_same in zip(self._parameters, same) if not is_same]

    def _marks(self) -> dict[str, tuple[int, int]]:
        return {name: (p._version, p.data_ptr()) for name, p in self._parameters.items()}

    def _checksums(self) -> Tensor:
        return torch.stack(list(_sums_of_bits(self._parameters.values()))) if self._parameters else torch.zeros(0)


@torch.no_grad()
def _sums_of_bits(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        yield real.view(_BITS[real.element_size()]).sum(dtype=torch.int64)
