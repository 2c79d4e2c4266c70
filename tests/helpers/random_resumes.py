"""Chains of Fabric runs drawn at random: each goes on from a checkpoint of the one before it, as another pipeline."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.schedule import largest_lookahead
from tests.helpers.cases import Case
from tests.helpers.random_cases import draw_from, is_exact, other_cut


@dataclass(frozen=True)
class Leg:
    """A run of a chain.

    Attributes:
        stages: of the pipeline, in every replica.
        case: what is run.
        saves_at: number of mini-batches after which the checkpoint is saved that the next leg goes on from.
        evaluates: mini-batches after which it drains and evaluates.
        options: more of the strategy's.
    """

    stages: int
    case: Case
    saves_at: int | None
    evaluates: tuple[int, ...]
    options: dict[str, Any]


@st.composite
def chains(draw: st.DrawFn) -> tuple[Leg, ...]:
    """Two to four runs."""
    rng = draw(st.randoms(use_true_random=True))
    first = _case(rng)
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
    """What all of the chain is, by the oracle."""
    last = legs[-1].case
    first_with_delay = next((number for number, leg in enumerate(legs) if leg.case.delay), 0)
    start = legs[first_with_delay - 1].saves_at if first_with_delay else 0
    # Replicas read the same data: g + g over w + w is g over w exactly.
    return replace(last, start=start or 0, data_parallel_size=1)


def _case(rng: random.Random) -> Case:
    while True:
        stages, case = draw_from(rng)
        least = 1 + (case.data_parallel_size > 1)  # microbatches, with which a run without delay may become one with
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
    """Any pipeline that does the same; where stages differ in staleness they stay where they are."""
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
        lookahead = case.lookahead  # it is part of the rule
    options = {"state_dict_type": rng.choice(["full", "sharded"]), "async_checkpoints": rng.random() < 0.5}
    evaluates = tuple(t for t in range(len(case.mini_batches)) if rng.random() < 0.2)
    return Leg(stages, replace(case, cut=cut, lookahead=lookahead), saves_at, evaluates, options)
