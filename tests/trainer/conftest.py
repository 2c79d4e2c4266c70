"""The worker pools that all tests of the Trainer strategies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.trainer.pool import Pools


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pools = Pools()
    yield pools
    pools.close()
    torch.set_num_threads(threads)
