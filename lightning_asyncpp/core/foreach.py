"""Elementwise operations on all tensors of a stage, in a few kernels.

torch documents ``torch.foreach`` from version 2.15 on. Older versions have only the names with an underscore, which
newer versions keep. No function here accepts an empty list.
"""

from __future__ import annotations

import torch

from lightning_asyncpp.dependencies import required

_PURPOSE = "work on many tensors at once"
divide_ = required(torch, "_foreach_div_", _PURPOSE)
"""Divide every tensor in place by one number."""
copy_ = required(torch, "_foreach_copy_", _PURPOSE)
"""Copy every tensor of the second list into the tensor at the same position in the first list."""
norm = required(torch, "_foreach_norm", _PURPOSE)
"""Return the norm of the given order of every tensor, computed in ``dtype``, as a tensor without dimensions."""
