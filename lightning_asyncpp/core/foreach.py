"""Elementwise work on all tensors of a stage at once, in a few kernels where torch has them.

torch documents ``torch.foreach`` from version 2.15 on and keeps the underscored names beside it, which older versions
have alone; they are used here and nowhere else. None of them takes an empty list.
"""

from __future__ import annotations

import torch

from lightning_asyncpp.dependencies import required

_PURPOSE = "work on many tensors at once"
divide_ = required(torch, "_foreach_div_", _PURPOSE)
"""Divide every tensor in place, by one number."""
copy_ = required(torch, "_foreach_copy_", _PURPOSE)
"""Copy every source into the destination at its position."""
norm = required(torch, "_foreach_norm", _PURPOSE)
"""2-norm of every tensor, as a list of tensors without dimensions, computed in ``dtype``."""
