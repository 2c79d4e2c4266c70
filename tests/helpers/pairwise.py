"""Few cases in which every two values of every two factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence
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


def covering(rows: Sequence[Mapping[str, Hashable]], of: Sequence[str] = ()) -> set[int]:
    """Indices of few rows in which all pairs of values meet that meet in some row; greedy and deterministic.

    With ``of``, all those pairs of which one value is of these factors.
    """
    pairs = [
        {(a, b) for a, b in itertools.combinations(row.items(), 2) if not of or a[0] in of or b[0] in of}
        for row in rows
    ]
    missing: set[Any] = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
