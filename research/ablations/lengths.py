"""What a delay costs by the length of a training: the further updates that it takes to the same loss.

For that the variants of a recipe are named after their length: ``600-updates``, ``1200-updates``, ...
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import pandas as pd

from research.ablations.rows import Group, Row
from research.ablations.summary import Ablation


def length_of(group: Group) -> int | None:
    """Updates of a variant that is named after them; None of any other."""
    found = re.fullmatch(r"(\d+)-updates", group.variant or "")
    return int(found[1]) if found else None


def size_of(group: Group) -> float | None:
    """Millions of parameters of a variant that is named after them, such as ``0.14M``; None of any other."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)M", group.variant or "")
    return float(found[1]) if found else None


def further_updates(ablation: Ablation, row: Row) -> pd.Series | None:
    """How many more updates, as a share, a row needs than training without delay to the loss that it ends at, by seed.

    The losses at the ends of all trainings without delay, of the same seed, are joined by straight lines against the
    logarithm of their length, and prolonged beyond the shortest and the longest.

    Returns:
        None where there are not at least two lengths without delay, or that loss is none that they come to.
    """
    length = length_of(row.group)
    if length is None:
        return None
    found = {}
    for seed, loss in ablation.results[row].losses.dropna().items():
        equal = updates_to(_without_delay(ablation, row, int(str(seed))), loss)
        if equal is not None:
            found[seed] = length / equal - 1
    return pd.Series(found) if found else None


def updates_to(points: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Length at which a curve of losses at the ends of trainings, (updates, loss), the shortest first, has a loss.

    Returns:
        None with fewer than two points, or where the loss does not fall.
    """
    pairs = list(itertools.pairwise(points))
    if not pairs:
        return None
    (first, first_loss), (second, second_loss) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    if second_loss >= first_loss:
        return None
    share = (first_loss - loss) / (first_loss - second_loss)
    return math.exp(math.log(first) + share * math.log(second / first))


def _without_delay(ablation: Ablation, row: Row, seed: int) -> list[tuple[int, float]]:
    """(Updates, loss) of the trainings of a seed without delay, the shortest first."""
    points = []
    for group in ablation.groups:
        length, sync = length_of(group), ablation.sync(group)
        same = group[:2] == row.group[:2]
        if length is not None and same and sync is not None and seed in sync.losses.dropna().index:
            points.append((length, float(sync.losses[seed])))
    return sorted(points)
