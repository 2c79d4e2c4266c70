"""Numbers that the host wants to know of tensors on a GPU: asked for together and early, waited for late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Reading:
    """Numbers on their way from the device to the host.

    What is asked for together is one copy, behind all that was launched before it: so it waits for the device once at
    most, and not at all if the device has got there when somebody looks. On a CPU the numbers are there at once.

    Args:
        tensors: of any shape and real dtype; they may change afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
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
        numbers = torch.cat([piece.double() for piece in pieces])
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.current_stream(device).record_event()

    def is_there(self) -> bool:
        """Whether :meth:`get` need not wait."""
        return self._event is None or self._event.query()

    def get(self) -> list[list[float]]:
        """The numbers of each tensor, in its order in memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            found = dict(zip(self._order, self._copy.split(self._sizes)))
            self._numbers = [found[place].tolist() for place in range(len(found))]
        return self._numbers
