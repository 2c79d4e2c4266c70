"""The worker pools that all tests of the Trainer strategies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.pool import Pools
from tests.helpers.workers import opened


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Of one module: pools that stay gather threads, and what a scenario sets in a worker would reach other tests."""
    with opened(Pools()) as pools:
        yield pools
