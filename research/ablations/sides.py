"""Both sides at their best: how far every run of an optimizer ends above runs without a delay, the best and its own.

Looking ahead is part of an optimizer's name: ``Muon-ahead`` is of Muon's family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from research.ablations.rows import UNCORRECTED, Group, Row, Setting, natural
from research.ablations.summary import NO_DELAY, Ablation, Result, common_half_width, difference

_AHEAD = "-ahead"
_MOST_DELAYS = 6  # more are no table
Distances = dict[str, dict[Setting, pd.Series]]


class Family(NamedTuple):
    """An optimizer alone, with corrections and looking ahead.

    Attributes:
        label: its name.
        best: of its rows without delay, the one with the lowest mean loss.
        gaps: kind ("alone", "EF", "looking ahead") -> delay -> distance to `best`, by seed; empty for itself.
        costs: the same, distance to the run without delay of its own kind, for Error Feedback alone.
        half_width: half of the 95 % interval of a mean distance, from all rows.
    """

    label: str
    best: Result
    gaps: Distances
    costs: Distances
    half_width: float | None


def delays_of(ablation: Ablation) -> list[Setting]:
    """Return all delays in order; none if nothing looks ahead, or if there are too many for a table."""
    settings = {row.setting for row in ablation.results} - {NO_DELAY}
    if not any(group.optimizer.endswith(_AHEAD) for group in ablation.groups) or len(settings) > _MOST_DELAYS:
        return []
    return sorted(settings, key=lambda setting: (natural(setting[0]), setting[1] or 0))


def families(ablation: Ablation) -> Iterator[Family]:
    """Yield every optimizer that was run without a delay."""
    members: dict[Group, dict[Row, Result]] = {}
    for row, result in ablation.results.items():
        group = row.group._replace(optimizer=row.optimizer.removesuffix(_AHEAD))
        members.setdefault(group, {})[row] = result
    for group, results in members.items():
        fresh = [one for row, one in results.items() if row.setting == NO_DELAY and not one.losses.isna().any()]
        if fresh:
            best = min(fresh, key=lambda one: (-one.losses.count(), one.losses.mean()))
            yield _family(ablation, group.label, best, results)


def _family(ablation: Ablation, label: str, best: Result, results: Mapping[Row, Result]) -> Family:
    gaps: Distances = {}
    costs: Distances = {}
    for row, one in results.items():
        kind = "looking ahead" if row.optimizer.endswith(_AHEAD) else row.correction.replace(UNCORRECTED, "alone")
        gap, cost = difference(one, best), ablation.gap(row)
        gaps.setdefault(kind, {})[row.setting] = gap if one is not best else pd.Series(dtype=float)
        if row.setting != NO_DELAY and cost is not None:
            costs.setdefault(kind, {})[row.setting] = cost
    return Family(label, best, gaps, costs, common_half_width([one.losses for one in results.values()]))
