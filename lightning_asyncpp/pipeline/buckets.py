"""Flat buckets of gradients, for one reduction over the replicas instead of one per parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Gradients = dict[str, "Tensor | None"]


class GradientBuckets:
    """Gradients packed by dtype into flat tensors that an all-reduce sums in place.

    Each bucket ends with one flag per gradient that says whether there is one: a parameter that no replica used keeps
    a gradient of None after the reduction, or the optimizer would decay it.

    Args:
        gradients: name -> gradient or None.
        like: name -> a tensor of the gradient's shape, dtype and device.
        bucket_bytes: size from which on a bucket is closed, in bytes.
    """

    def __init__(self, gradients: Gradients, like: Mapping[str, Tensor], bucket_bytes: int = 32 * 2**20) -> None:
        self._like = like
        self._names: list[list[str]] = []
        self.flat: list[Tensor] = []
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in gradients:
            by_dtype.setdefault(like[name].dtype, []).append(name)
        for names in by_dtype.values():
            for part in self._parts(names, bucket_bytes):
                self._names.append(part)
                self.flat.append(self._pack(gradients, part))

    def unpack(self) -> Gradients:
        """Return the (summed) gradients as views of the buckets."""
        gradients: Gradients = {}
        for flat, names in zip(self.flat, self._names):
            sizes = [self._like[name].numel() for name in names]
            *pieces, flags = flat.split([*sizes, len(names)])
            present = (flags > 0).tolist()
            for name, piece, there in zip(names, pieces, present):
                gradients[name] = piece.view(self._like[name].shape) if there else None
        return gradients

    def _parts(self, names: list[str], bucket_bytes: int) -> list[list[str]]:
        parts: list[list[str]] = [[]]
        size = 0
        for name in names:
            if size >= bucket_bytes:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += self._like[name].numel() * self._like[name].element_size()
        return parts

    def _pack(self, gradients: Gradients, names: list[str]) -> Tensor:
        pieces = []
        for name in names:
            gradient = gradients[name]
            pieces.append(torch.zeros_like(self._like[name]).view(-1) if gradient is None else gradient.reshape(-1))
        flags = [float(gradients[name] is not None) for name in names]
        return torch.cat([*pieces, torch.tensor(flags, dtype=pieces[0].dtype, device=pieces[0].device)])
