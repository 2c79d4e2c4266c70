"""Flat buckets of gradients, for one reduction over the replicas instead of one per parameter."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

Gradients = dict[str, "Tensor | None"]
BUCKET_BYTES = 16 * 2**20
GPU_BUCKET_BYTES = 64 * 2**20
"""An all-reduce of NCCL is a kernel that takes part of the GPU from the backward: fewer of them."""
_ALIGNMENT = 64
"""Bytes: where torch's own tensors begin. Products of matrices are rounded by where these begin in memory, which must
not depend on the stage that they are on."""


class Bucket:
    """Gradients of one dtype that are packed into a flat tensor, which an all-reduce sums in place.

    It ends with one flag per gradient that says whether there is one: a parameter that no replica used keeps a gradient
    of None after the reduction, or the optimizer would decay it.

    Args:
        names: of the parameters.
        like: name -> a tensor of the gradient's shape, dtype and device.
    """

    def __init__(self, names: Sequence[str], like: Mapping[str, Tensor]) -> None:
        self.names = list(names)
        self._like = like
        self._padding: list[int] = []  # elements before each gradient
        end, step = 0, max(1, _ALIGNMENT // like[self.names[0]].element_size())
        for name in self.names:
            self._padding.append(-end % step)
            end += self._padding[-1] + like[name].numel()

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._like[self.names[0]].device

    def pack(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Return the gradients of this bucket as a new flat tensor; what is None counts as zeros."""
        present = [gradients[name] for name in self.names]
        pieces: list[Tensor] = []
        for name, gradient, padding in zip(self.names, present, self._padding):
            like = self._like[name]
            pieces += [like.new_zeros(padding)] if padding else []
            pieces.append(like.new_zeros(like.numel()) if gradient is None else gradient.reshape(-1))
        for there, run in itertools.groupby(gradient is not None for gradient in present):
            # Filled where they are: a copy from the host would wait for the GPU.
            pieces.append(like.new_full((len(list(run)),), float(there)))
        return torch.cat(pieces)

    def unpack(self, flat: Tensor) -> Gradients:
        """Return the (summed) gradients as views of ``flat``; waits for the device."""
        gradients, flags = self.views(flat)
        return {name: g if flag > 0 else None for (name, g), flag in zip(gradients.items(), flags.tolist())}

    def views(self, flat: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return views of ``flat``: of every (summed) gradient, as if it were there; and of their flags (names,).

        A gradient is there if its flag is above 0.
        """
        sizes = [n for name, pad in zip(self.names, self._padding) for n in (pad, self._like[name].numel())]
        *pieces, flags = flat.split([*sizes, len(self.names)])
        return {name: p.view(self._like[name].shape) for name, p in zip(self.names, pieces[1::2])}, flags


def plan_buckets(
    like: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES, late: Collection[str] = ()
) -> list[Bucket]:
    """Spread parameters over buckets, the last first: so their gradients become complete.

    Args:
        like: name -> a tensor of the gradient's shape, dtype and device, in the order of the forward.
        bucket_bytes: size from which on a bucket is closed, in bytes.
        late: those whose gradients are complete only after a whole backward; they come last, in buckets of their own.
    """
    together: dict[tuple[bool, torch.dtype], list[str]] = {}
    backwards = list(reversed(list(like)))
    for name in [n for n in backwards if n not in late] + [n for n in backwards if n in late]:
        together.setdefault((name in late, like[name].dtype), []).append(name)
    return [Bucket(names, like) for group in together.values() for names in _parts(group, like, bucket_bytes)]


def _parts(names: list[str], like: Mapping[str, Tensor], bucket_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name in names:
        if size >= bucket_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += like[name].nbytes
    return parts
