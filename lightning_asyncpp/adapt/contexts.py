"""What a forward switches on or off around its blocks, in which they are to run as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

Context = tuple[bool, tuple[tuple[str, bool, str], ...]]
"""Whether gradients are recorded; by type of device whether autocast is on, and its dtype. It may cross a cut."""
_DEVICES = ("cpu", "cuda")


def context_now() -> Context:
    """That of the code that runs."""
    autocast = ((d, torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in _DEVICES)
    return torch.is_grad_enabled(), tuple(autocast)


@contextmanager
def entered(context: Context | None) -> Iterator[None]:
    """Run code in a context; in None as it is."""
    with ExitStack() as stack:
        if context is not None:
            is_recorded, autocast = context
            stack.enter_context(torch.set_grad_enabled(is_recorded and torch.is_grad_enabled()))
            for device, is_enabled, dtype in autocast:
                dtype = getattr(torch, dtype.removeprefix("torch."))
                if (is_enabled, dtype) != (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_enabled))
        yield


def is_checkpointed() -> bool:
    """Whether code runs in a checkpoint that will run it again for gradients, and records none (use_reentrant=True)."""
    code, frame = CheckpointFunction.forward.__code__, sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def runs_again() -> bool:
    """Whether code runs in a checkpoint of either kind."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Attention has a fast path in evaluation, which rounds otherwise, and asks masks for their values to pack padding.

    The code around blocks does without: what it gives to blocks is the same in a forward that is looked into, where
    torch does not take that path, and in one that is not.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
