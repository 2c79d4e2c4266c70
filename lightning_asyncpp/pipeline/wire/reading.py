"""Numbers that the host wants to know of tensors on a GPU: asked for together and early, waited for late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.wire.host_copies import HostCopy


class Reading:
    """Numbers on their way from the device to the host.

    What is asked for together is one copy, behind all that was launched before it: so it waits for the device once at
    most, and not at all if the device has got there when somebody looks. On a CPU the numbers are there at once.

    Args:
        tensors: of any shape and real dtype; they may change afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copy: HostCopy | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._numbers = [t.reshape(-1).tolist() if t.ndim else [t.item()] for t in tensors]
            return
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        # Tensors of one dtype together, in few kernels.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(flat):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        self._order = [place for places in by_dtype.values() for place in places]
        self._sizes = [flat[place].numel() for place in self._order]
        device = next(tensor.device for tensor in flat if tensor.is_cuda)
        pieces = [torch.cat([flat[p].to(device, non_blocking=True) for p in places]) for places in by_dtype.values()]
        self._copy = HostCopy(torch.cat([piece.double() for piece in pieces]))

    def is_there(self) -> bool:
        """Whether :meth:`get` need not wait."""
        return self._copy is None or self._copy.is_done()

    def get(self) -> list[list[float]]:
        """The numbers of each tensor, in its order in memory."""
        if self._copy is not None:
            found = dict(zip(self._order, self._copy.wait().split(self._sizes)))
            self._copy = None
            self._numbers = [found[place].tolist() for place in range(len(found))]
        return self._numbers
