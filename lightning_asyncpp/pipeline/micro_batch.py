"""Micro-batches: cutting a batch, weighing the pieces, and telling two batches apart."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.tree import map_tensors, tensors_of

# The fingerprint looks at this many elements of a tensor at most, evenly spread.
_FINGERPRINT_ELEMENTS = 1024


def number_of_samples(batch: Any) -> int:
    """Size of the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: no tensor of the batch has a first dimension.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim > 0:
            return tensor.size(0)
    raise ConfigurationError(
        f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension: the pipeline cannot cut it;"
        " define split_batch(batch, parts) and micro_batch_weight(micro_batch) on the module"
    )


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut every tensor of a batch along its first dimension into ``parts`` slots.

    Sizes differ by one sample at most, as ``torch.tensor_split`` cuts; a slot without samples is ``None``. Tensors
    without dimensions and other leaves are handed to every micro-batch as they are.

    Raises:
        ConfigurationError: the tensors of the batch have different first dimensions.
    """
    samples = number_of_samples(batch)
    sizes = {tensor.size(0) for tensor in tensors_of(batch) if tensor.ndim > 0}
    if sizes != {samples}:
        raise ConfigurationError(
            f"the tensors of a batch have different first dimensions {sorted(sizes)}: the pipeline cannot tell which of"
            " them are batched; define split_batch(batch, parts) on the module"
        )
    slots: list[Any] = []
    for part in range(parts):
        start, end = _bounds(samples, parts, part)
        slots.append(map_tensors(lambda x: _slice(x, start, end), batch) if end > start else None)  # noqa: B023
    return slots


def _bounds(samples: int, parts: int, part: int) -> tuple[int, int]:
    # The first samples % parts pieces hold one sample more: torch.tensor_split's rule.
    size, longer = divmod(samples, parts)
    start = part * size + min(part, longer)
    return start, start + size + (1 if part < longer else 0)


def _slice(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor[start:end] if tensor.ndim > 0 else tensor


def fingerprint(batch: Any) -> int:
    """A number of 63 bits that two different batches share with a probability of about 2**-63.

    It hashes up to 1024 evenly spread elements of every tensor, its shape and its dtype.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors_of(batch):
        flat = tensor.detach().reshape(-1)
        stride = -(-flat.numel() // _FINGERPRINT_ELEMENTS) or 1
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
