"""Names that are near to one that does not exist; nothing heavy is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 3
_LIKE = 0.7
_AS_LIKE = 0.08
_LISTED = 12
_SAME = {"learningrate": "lr"}
"""What another library calls it -> what it is called here."""
_WHOLE, _PART = 0, 1


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names that somebody may have meant, the likeliest first; none if nothing is like it.

    Hyphens, underscores and capitals make no difference. A name without a dot may be the end of a dotted one:
    ``mircobatches`` of ``trainer.strategy.micro_batches``.

    Args:
        name: what was given.
        known: all that could have been.
    """
    scored: dict[str, tuple[int, float]] = {}
    for candidate in known:
        whole = _likeness(name, candidate)
        end = _likeness(name.rpartition(".")[2], candidate.rpartition(".")[2])
        if whole >= _LIKE:
            scored[candidate] = (_WHOLE, -max(whole, end))
        elif end >= _LIKE and ("." not in name or name.partition(".")[0] == candidate.partition(".")[0]):
            scored[candidate] = (_PART, -end)
    best = sorted(scored, key=lambda candidate: (*scored[candidate], candidate.count("."), candidate))
    if not best:
        return []
    best_score = scored[best[0]][1]
    worst = best_score if best_score == -1.0 else best_score + _AS_LIKE
    return [candidate for candidate in best if scored[candidate][1] <= worst][:_MOST]


def advice(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What to say of a name that does not exist, after a semicolon; empty if nothing helps.

    Args:
        name: what was given.
        known: all that could have been; few are listed where none is like it.
        prefix: goes before each of them.
    """
    known = list(dict.fromkeys(known))
    if near := nearest(name, known):
        return f"; did you mean {' or '.join(prefix + candidate for candidate in near)}?"
    if 0 < len(known) <= _LISTED:
        return f"; there are {', '.join(prefix + candidate for candidate in known)}"
    return ""


def _likeness(first: str, second: str) -> float:
    first, second = (name.lower().replace("-", "").replace("_", "") for name in (first, second))
    first = _SAME.get(first, first)
    return difflib.SequenceMatcher(None, first, second).ratio()
