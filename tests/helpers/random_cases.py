"""Cases drawn at random: models, cuts and everything that a run may have, in combinations that nobody thought of."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_asyncpp.core.cut.units import Unit, has_parameters, pipeline_units
from lightning_asyncpp.core.schedule import largest_lookahead
from tests.helpers.cases import OPTIMIZERS, Case
from tests.helpers.random_layers import FORMS, KINDS, SHARED, make


def draw(seed: int) -> tuple[int, Case]:
    """A number of stages and a case that it can run; the same ones for the same seed."""
    return draw_from(random.Random(seed))


def draw_from(rng: random.Random) -> tuple[int, Case]:
    """The next ones of a generator."""
    while True:
        stages, replicas = rng.choice([(1, 1), (1, 2), (2, 1), (2, 1), (2, 2), (3, 1), (3, 1), (4, 1)])
        model = functools.partial(make, _layers(rng))
        units = pipeline_units(model(0.0))
        counts = _counts(rng, units, stages)
        if counts is not None:
            case = _case(rng, stages, replicas, is_exact(units, counts, replicas))
            return stages, Case(**case, model=model, cut=tuple(counts), data_parallel_size=replicas)


def other_cut(rng: random.Random, case: Case, stages: int) -> tuple[int, ...] | None:
    """Any cut of a case's model with which it does the same to the last bit; None if none was found."""
    units = pipeline_units(case.make_model())
    for _ in range(20):
        counts = _counts(rng, units, stages)
        if counts is not None and is_exact(units, counts, case.data_parallel_size):
            return tuple(counts)
    return None


def is_exact(units: Sequence[Unit], counts: Sequence[int], replicas: int) -> bool:
    """Whether stages add the gradients of shared weights in the order of one process.

    They do not if replicas reduce the sum of several uses on a stage, to which that of a stage behind is added.
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
    """``skips``: updates are left out, which all stages must agree on before."""
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
        "max_norm": rng.choice([0.3, 0.05] if optimizer == "counting" else [None, 0.3, 0.05]),  # it would diverge
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
        **_staleness(rng, stages if delay else 1, nan_at is not None),
        "bf16": exact and rng.random() < 0.4,
        "seed": rng.randrange(100),
    }
