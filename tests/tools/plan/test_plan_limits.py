"""The search for the largest number that fits, against a search one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lightning_asyncpp.tools.plan.search import largest_within

MOST = 2**12
NEEDS: dict[str, Callable[[int], float]] = {
    "line": lambda n: 100 + 7 * n,
    "another stage or moment is the largest": lambda n: max(1000 + n, 3 * n, 10 * n - 5000, 100 * n - 300000),
    "blocks": lambda n: 100 + n // 64 * 512,
    "square": lambda n: n * n,  # every sample beside every other
    "root": lambda n: 100 * math.sqrt(n),
    "nothing": lambda n: 5,
}


@pytest.mark.parametrize("room", [4, 150, 1500, 50_000, 1e6])
@pytest.mark.parametrize("name", NEEDS)
def test_it_is_the_largest_that_fits(name: str, room: float) -> None:
    need, looks = NEEDS[name], []

    def looked(size: int) -> float:
        looks.append(size)
        return need(size)

    fitting = [size for size in range(1, MOST + 1) if need(size) <= room]
    assert largest_within(looked, room, MOST) == (fitting[-1] if fitting else None)
    assert len(looks) == len(set(looks)) <= 3 * math.log2(MOST)
    assert all(1 <= size <= MOST for size in looks)
    if name == "line":
        assert len(looks) <= 4
