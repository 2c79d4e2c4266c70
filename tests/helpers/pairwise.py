"""Few cases in which every two values of every two factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 12) -> list[dict[str, Any]]:
    """Greedy and deterministic: each row starts with a missing pair and is the best of some random completions."""
    rng = random.Random(seed)
    names = list(factors)
    missing = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    )
    rows = []
    while missing:
        start = dict(next(iter(missing)))
        candidates = [{n: start.get(n, rng.randrange(len(factors[n]))) for n in names} for _ in range(tries)]
        best = max(candidates, key=lambda row: sum(pair in missing for pair in _pairs(row)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _pairs(row: dict[str, int]) -> itertools.combinations:
    return itertools.combinations(row.items(), 2)
