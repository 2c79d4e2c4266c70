"""Settings for all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

# The same examples everywhere, and no time limit: machines that run tests are slow at times.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

torch.set_num_threads(1)
