"""A number that tells whether the step called the model with the same arguments on the first and on the last stage.

Both run the step up to its call with the same micro-batch and the same random numbers. What the step keeps from one
call to the next in the module, after the call, exists on the last stage alone, and so do random numbers of Python or
numpy that are drawn there: where such a thing reaches the arguments, the last stage, which has no use for them, would
train with another model input than it thinks.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.batches.tree import leaves_of

_PARTS, _NUMBER = struct.Struct("<fI"), struct.Struct("<q")
_SAMPLED, _MOST_LEAVES = 64, 64  # elements of each tensor, and tensors or numbers
_TOLERANCE = 1e-3  # relative: operations before the call may round otherwise on another device, in bf16, too
_WEIGHTS = (1.0, 2.7, 1.9, 3.4, 1.3, 2.2, 3.1)  # so that the order of arguments counts
NOT_LOOKED_AT = 0


def digest(args: tuple, kwargs: dict[str, Any]) -> int:
    """The number of a call's arguments, of 64 bits: the size of what is real in them, and a hash of everything else."""
    size, told = 0.0, zlib.crc32(repr(sorted(kwargs)).encode())
    for place, leaf in zip(range(_MOST_LEAVES), leaves_of((args, [kwargs[key] for key in sorted(kwargs)]))):
        real, other = _of_tensor(leaf) if isinstance(leaf, Tensor) else _of_number(leaf)
        size += real * _WEIGHTS[place % len(_WEIGHTS)]
        told = zlib.crc32(other, told)
    return int(_NUMBER.unpack(_PARTS.pack(min(size, 3e38), told | 1))[0])


def differ(there: int, here: int) -> bool:
    """Whether two digests are those of different arguments."""
    (size, told), (own_size, own_told) = (_PARTS.unpack(_NUMBER.pack(number)) for number in (there, here))
    return told != own_told or not math.isclose(size, own_size, rel_tol=_TOLERANCE, abs_tol=1e-6)


def _of_tensor(tensor: Tensor) -> tuple[float, bytes]:
    """The size of what is real in a tensor, and what else there is to say of it."""
    text = f"{tuple(tensor.shape)}{tensor.dtype}".encode()
    flat = tensor.detach().reshape(-1)
    if not flat.numel() or flat.is_meta or type(flat) is not Tensor:  # one without values, or that may have none
        return 0.0, text
    some = flat[:: -(-flat.numel() // _SAMPLED)].cpu()
    if not some.is_floating_point():
        return 0.0, text if some.is_complex() else text + some.contiguous().view(torch.uint8).numpy().tobytes()
    weights = torch.linspace(1.0, 2.0, some.numel(), dtype=torch.float64)
    finite = torch.nan_to_num(some.double(), nan=0.5, posinf=0.25, neginf=0.125)
    return float((finite.abs() * weights + finite.clamp(min=0)).sum()), text


def _of_number(leaf: Any) -> tuple[float, bytes]:
    if isinstance(leaf, float):
        return (abs(leaf) if math.isfinite(leaf) else 0.0), b"float"
    is_plain = isinstance(leaf, (bool, int, str, bytes, type(None)))
    return 0.0, (repr(leaf) if is_plain else type(leaf).__name__).encode()
