"""The worker pools that all tests of the Trainer strategies share.

To start a rank costs as much as two short trainings in it, so pools outlive the files that use them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.pool import Pools
from tests.workers import opened


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    with opened(Pools()) as pools:
        yield pools
