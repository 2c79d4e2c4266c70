"""The worker pools that all tests of the Trainer strategies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.pool import Pools
from tests.workers import opened


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Of one test process: a new pool for each of a hundred modules took half a minute of processor time."""
    with opened(Pools()) as pools:
        yield pools
