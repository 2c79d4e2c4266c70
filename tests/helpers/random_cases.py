"""Cases drawn at random: models, cuts and all options of a run, in combinations that nobody thought of."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from torch import nn

from lightning_asyncpp.core.cut.units import Unit, has_parameters, pipeline_units
from lightning_asyncpp.core.schedule import largest_lookahead
from tests.helpers.cases import FORMS, KINDS, OPTIMIZERS, SHARED, Case, make


def draw(seed: int) -> tuple[int, Case]:
    """Return a number of stages and a case that they can run, which are determined by the seed."""
    return draw_from(random.Random(seed))


def draw_from(rng: random.Random) -> tuple[int, Case]:
    """Return a number of stages and a case that they can run, drawn from a generator."""
    while True:
        stages, replicas = rng.choice([(1, 1), (1, 2), (2, 1), (2, 1), (2, 2), (3, 1), (3, 1), (4, 1)])
        model = functools.partial(make, _layers(rng))
        units = pipeline_units(model(0.0))
        counts = _counts(rng, units, stages)
        if counts is not None:
            case = _case(rng, stages, replicas, is_exact(units, counts, replicas))
            return stages, Case(**case, model=model, cut=tuple(counts), data_parallel_size=replicas)


def other_cut(rng: random.Random, case: Case, stages: int) -> tuple[int, ...] | None:
    """Return a random cut of a case's model with bitwise the same results; None if none was found."""
    units = pipeline_units(case.make_model())
    for _ in range(20):
        counts = _counts(rng, units, stages)
        if counts is not None and is_exact(units, counts, case.data_parallel_size):
            return tuple(counts)
    return None


def is_exact(units: Sequence[Unit], counts: Sequence[int], replicas: int) -> bool:
    """Return whether stages add the gradients of shared weights in the same order as a single process.

    They do not if replicas reduce the sum of several uses on one stage, and a later stage's sum is added to it.
    """
    if replicas == 1:
        return True
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    places: dict[nn.Parameter, list[int]] = {}  # parameter -> stages of its uses
    for unit, stage in zip(units, stages):
        for parameter in unit.module.parameters():
            places.setdefault(parameter, []).append(stage)
    return all(
        held.count(stage) == 1 for p, held in places.items() if p.requires_grad for stage in held if stage < held[-1]
    )


def _layers(rng: random.Random) -> tuple[tuple[str, str], ...]:
    kinds = [*rng.choice([["linear"], ["projection", "linear"]]), *rng.choices([*KINDS, *SHARED], k=rng.randint(2, 7))]
    return tuple((kind, rng.choice(["tensor", "tensor", *FORMS])) for kind in kinds)


def _counts(rng: random.Random, units: Sequence[Unit], stages: int) -> list[int] | None:
    if len(units) < stages:
        return None
    ends = [*sorted(rng.sample(range(1, len(units)), stages - 1)), len(units)]
    counts = [end - start for start, end in zip([0, *ends], ends)]
    heavy = [has_parameters(unit) for unit in units]
    return counts if all(any(heavy[end - count : end]) for end, count in zip(ends, counts)) else None


def _staleness(rng: random.Random, stages: int, skips: bool) -> dict[str, Any]:
    """Return random options; ``skips``: updates may be skipped, so all stages must agree on each one first."""
    if stages == 1 or rng.random() < 0.4:
        return {}
    return {"staleness": "least", "slack": "exact" if skips else rng.choice(["exact", 0, 0, 1, 2, stages, 20])}


def _case(rng: random.Random, stages: int, replicas: int, exact: bool) -> dict[str, Any]:
    delay = rng.choice([1, 1, 1, 0])
    microbatches = rng.randint(stages + (replicas > 1) if delay else 1, rng.choice([2, 2, 4]) * stages + 2)
    batches = rng.randint(3, 7)
    accumulate = rng.choice([1, 1, 2])
    nan_at = rng.choice([None, None, rng.randrange(batches)])
    optimizer = rng.choice(list(OPTIMIZERS))
    ends = [*range(accumulate - 1, batches, accumulate), batches - 1]

    def some(places: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({rng.choice(places) for _ in range(rng.choice([0, 0, 1, 2]))}))

    return {
        "microbatches": microbatches,
        "lookahead": rng.randint(0, largest_lookahead(stages, microbatches, replicas)) if delay else None,
        "delay": delay,
        "optimizer": optimizer,
        "error_feedback": rng.choice([None, 1.0, 0.5, 0.7]),
        "max_norm": rng.choice([0.3, 0.05] if optimizer == "counting" else [None, 0.3, 0.05]),  # unclipped, it diverges
        "scheduler": rng.random() < 0.5,
        "dropout": rng.choice([0.0, 0.3]) if replicas == 1 else 0.0,
        "random_input": rng.random() < 0.3 and replicas == 1,
        "accumulate": accumulate,
        "batch_sizes": tuple(rng.choice([9, 8, 8, 7, 4, 2, 1, 0]) for _ in range(batches)),
        "unequal_weights": rng.random() < 0.5,
        "nan_at": nan_at,
        "drains": some(range(batches)),
        "resumes": some(ends),
        "evaluates": some(ends),
        "checkpointing": rng.random() < 0.4,
        "same_data": True,
        "start": rng.choice([0, 0, 2, 3]) if delay else 0,
        **_staleness(rng, stages if delay else 1, nan_at is not None),
        "bf16": exact and rng.random() < 0.4,
        "seed": rng.randrange(100),
    }


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return few cases that cover all pairs of two factors' values; each is greedily the best of random completions."""
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
        candidates = [{n: start.get(n, rng.randrange(len(factors[n]))) for n in names} for _ in range(12)]
        best = max(candidates, key=lambda row: sum(pair in missing for pair in _pairs(row)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _pairs(row: dict[str, int]) -> itertools.combinations:
    return itertools.combinations(row.items(), 2)


@dataclass(frozen=True)
class Leg:
    """One run in a chain of runs, each of which resumes the one before."""

    stages: int
    case: Case
    saves_at: int | None  # number of mini-batches before the checkpoint from which the next leg resumes
    evaluates: tuple[int, ...]  # mini-batches after which the run drains and evaluates
    options: dict[str, Any]  # further arguments of the strategy


@st.composite
def chains(draw: st.DrawFn) -> tuple[Leg, ...]:
    """Draw a chain of two to four runs."""
    rng = draw(st.randoms(use_true_random=True))
    first = _resumable(rng)
    count = len(first.mini_batches)
    ats = sorted(rng.sample(range(1, count), rng.randint(1, min(3, count - 1))))
    turning = rng.choice([None, *range(1, len(ats) + 1)]) if not (first.delay or first.bf16) else None
    legs, case = [_leg(rng, first, ats[0])], first
    for number, at in enumerate([*ats[1:], None], 1):
        if number == turning:
            case = replace(case, delay=1, microbatches=max(case.microbatches, 1 + (case.data_parallel_size > 1)))
        legs.append(_leg(rng, case, at))
    return tuple(legs)


def expected_case(legs: tuple[Leg, ...]) -> Case:
    """Return the single run, for the oracle, that is equivalent to a chain."""
    last = legs[-1].case
    first_with_delay = next((number for number, leg in enumerate(legs) if leg.case.delay), 0)
    start = legs[first_with_delay - 1].saves_at if first_with_delay else 0
    # Replicas read the same data, and (g + g) / (w + w) is exactly g / w.
    return replace(last, start=max(start or 0, last.start), data_parallel_size=1)


def _resumable(rng: random.Random) -> Case:
    while True:
        stages, case = draw_from(rng)
        least = 1 + (case.data_parallel_size > 1)  # fewest microbatches with which a run may be resumed with delay
        case = replace(case, drains=(), resumes=(), checkpointing=False, microbatches=max(case.microbatches, least))
        exact = other_cut(rng, case, stages) if case.staleness == "uniform" else None
        if len(case.mini_batches) > 1 and min(case.batch_sizes) > 0:
            if exact is not None:
                return replace(case, cut=exact)
            if case.staleness != "uniform" and is_exact(
                pipeline_units(case.make_model()), case.counts(stages), case.data_parallel_size
            ):
                return case


def _leg(rng: random.Random, case: Case, saves_at: int | None) -> Leg:
    """Return a leg on a random pipeline with the same results; the cut stays if stages may differ in staleness."""
    assert not isinstance(case.cut, str)
    stages, cut = len(case.cut), case.cut
    replicas = case.data_parallel_size
    if case.staleness == "uniform":
        most = min(4 // replicas, case.microbatches - (replicas > 1) if case.delay else 4)
        stages = rng.randint(1, most)
        found = other_cut(rng, case, stages)
        stages, cut = (stages, found) if found is not None else (1, (sum(cut),))
    lookahead = rng.randint(0, largest_lookahead(stages, case.microbatches, replicas)) if case.delay else None
    if case.staleness == "least":
        lookahead = case.lookahead  # the staleness depends on it
    options = {"state_dict_type": rng.choice(["full", "sharded"]), "async_checkpoints": rng.random() < 0.5}
    evaluates = tuple(t for t in range(len(case.mini_batches)) if rng.random() < 0.2)
    return Leg(stages, replace(case, cut=cut, lookahead=lookahead), saves_at, evaluates, options)
