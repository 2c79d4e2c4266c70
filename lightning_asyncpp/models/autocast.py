"""Where torch has automatic mixed precision, in a form that a compiler takes for a constant."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


has_autocast: Callable[[str], bool] = torch.compiler.assume_constant_result(_has_autocast)
"""Whether ``torch.autocast`` knows a type of device; it does not know "meta". The compiler of torch 2.11 cannot look
into torch's own function."""
