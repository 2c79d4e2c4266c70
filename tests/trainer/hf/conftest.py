"""The worker pools that all tests of this folder share: their processes import `transformers` once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.pool import Pools
from tests.helpers.workers import opened


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    with opened(Pools()) as pools:
        yield pools
