"""Settings for all tests."""

from __future__ import annotations

import signal

import torch
from hypothesis import settings

import tests.spared  # noqa: F401

# The same examples everywhere, and no time limit: machines that run tests are slow at times.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

torch.set_num_threads(1)

# A shell's background job ignores it, and so would every process that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)
