"""What corrections for delayed gradients may be given, and the words for what they may not."""

from __future__ import annotations

import torch
from torch import Tensor

BUFFER_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check_base(base: object) -> None:
    """Refuse what does not make an optimizer.

    Raises:
        TypeError: ``base`` is not callable.
    """
    if not callable(base):
        raise TypeError(
            f"`base` must be a callable that makes an optimizer from parameters, got {type(base).__name__}: pass the "
            "class or functools.partial(torch.optim.AdamW, lr=1e-3) instead of an optimizer that is already made"
        )


def check_arguments(name: str, problems: list[str]) -> None:
    """Raise one ValueError with all ``problems`` of the correction ``name``, if there are any."""
    if problems:
        raise ValueError(f"{name} cannot be set up:\n" + "\n".join(f"  - {problem}" for problem in problems))


def buffer_dtype_problems(buffer_dtype: str | None) -> list[str]:
    """What is wrong with a correction's ``buffer_dtype``."""
    if buffer_dtype in (None, *BUFFER_DTYPES):
        return []
    return [f"buffer_dtype must be None or one of {', '.join(BUFFER_DTYPES)}, got {buffer_dtype!r}"]


def check_lent(p: Tensor, lent: Tensor | None) -> None:
    """Refuse what cannot be the weights of ``p`` before a step, in memory of its own.

    Raises:
        ValueError: says why.
    """
    if lent is None:
        raise ValueError(f"weights_before() lacks a parameter of shape {tuple(p.shape)} that has a gradient")
    if lent.shape != p.shape or lent.dtype != p.dtype or lent.device != p.device:
        raise ValueError(
            f"the lent weights are {tuple(lent.shape)} {lent.dtype} on {lent.device}, their parameter is "
            f"{tuple(p.shape)} {p.dtype} on {p.device}"
        )
    # Not data_ptr(), which tensors without memory (`asyncpp plan`) do not have.
    same_storage = lent.untyped_storage() is p.untyped_storage()
    if p.numel() and same_storage and lent.storage_offset() == p.storage_offset():
        raise ValueError("the lent weights are the parameter itself: lend a copy that the step leaves as it is")
