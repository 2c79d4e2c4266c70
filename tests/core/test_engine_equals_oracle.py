"""The engine computes what the oracle computes, bitwise in fp32, whatever the pipeline looks like."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_asyncpp.core.schedule import Slack, Staleness, largest_lookahead
from tests.helpers.cases import Case
from tests.helpers.compare import (
    assert_same_losses,
    assert_same_norms,
    assert_same_statistics,
    assert_same_weights,
    weights_of,
)
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools
from tests.helpers.pairwise import covering, pairwise

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

STAGES = (1, 2, 3, 4)
STAGES_SYNCHRONOUS = (1, 3)
BATCH_SIZES = (
    (9, 9, 9, 9, 4),  # a partial last batch
    (7, 1, 5, 7, 2),  # batches smaller than microbatches
    (6, 6, 6, 0, 6),  # a batch without samples
    (5,),  # a run that ends before the first update is due
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "batch_sizes": BATCH_SIZES,
    "max_norm": (None, 0.3),
    "error_feedback": (None, 1.0, 0.5),
    "scheduler": (True, False),
    "optimizer": ("adamw", "muon", "counting"),
    "accumulate": (1, 2),
    "dropout": (0.0, 0.3),
    "random_input": (False, True),
    "unequal_weights": (True, False),
    "nan_at": (None, 2),
    "checkpointing": (False, True),
    "spare": (False, True),
    "tied": (False, True),
    "routed": (False, True),
    "bf16": (False, True),
    "cut": ("even", "front", "back"),
}


def check(engine_pools: EnginePools, num_stages: int, case: Case) -> None:
    results = engine_pools.run(case, num_stages)
    weights, losses = run_oracle(case, num_stages)
    assert_same_weights(results, weights)
    assert_same_losses(results, losses)
    assert_same_norms(results)
    assert_same_statistics(results)


def make_case(microbatches: int, lookahead: int | None, options: dict[str, Any], delay: int = 1) -> Case:
    if options["nan_at"] is not None and options["nan_at"] >= len(options["batch_sizes"]):
        options = options | {"nan_at": None}
    return Case(microbatches, lookahead, delay, **options)


def asynchronous(num_stages: int) -> list[tuple[int, Case]]:
    p = num_stages
    factors = {
        "microbatches": sorted({p, p + 1, 2 * p, 2 * p + 1, 4 * p}),
        "lookahead": sorted({0, 1, p - 1, p, 2 * p - 1, 3 * p}),
        **OPTIONS,
    }
    cases = []
    for row in pairwise(factors, seed=num_stages):
        microbatches, lookahead = row.pop("microbatches"), row.pop("lookahead")
        most = largest_lookahead(num_stages, microbatches, 1)
        cases.append((num_stages, make_case(microbatches, min(lookahead, most), row)))
    return cases


def synchronous(num_stages: int) -> list[tuple[int, Case]]:
    microbatches = sorted({1, max(num_stages - 1, 1), 2 * num_stages + 1})
    factors = {"microbatches": microbatches, "lookahead": (None, 1), **OPTIONS, "batch_sizes": BATCH_SIZES[:2]}
    rows = pairwise(factors, seed=num_stages)
    return [(num_stages, make_case(row.pop("microbatches"), row.pop("lookahead"), row, delay=0)) for row in rows]


def grid(num_stages: int) -> list[tuple[int, Case]]:
    """Every microbatch count with every lookahead, and every three options."""
    cases = []
    for microbatches in range(num_stages, 2 * num_stages + 2):
        for lookahead in range(largest_lookahead(num_stages, microbatches, 1) + 1):
            rows = pairwise(OPTIONS, seed=100 * microbatches + lookahead)
            cases += [(num_stages, make_case(microbatches, lookahead, row)) for row in rows]
    return cases


def parametrized(cases: list[tuple[int, Case]], marks: Sequence[Any] = ()) -> Any:
    rows = [
        pytest.param(num_stages, case, marks=mark, id=f"P{num_stages}-m{case.microbatches}-c{case.lookahead}-{i}")
        for i, ((num_stages, case), mark) in enumerate(itertools.zip_longest(cases, marks, fillvalue=()))
    ]
    return pytest.mark.parametrize(("num_stages", "case"), rows)


# What the schedule and the updates have to do with each other; the rest is the layers' own, whatever the schedule.
ABOUT_UPDATES = (
    *("batch_sizes", "max_norm", "error_feedback", "accumulate", "nan_at", "tied", "routed", "lookahead"),
    *("staleness", "slack", "drains"),
)


def few_of(cases: list[tuple[int, Case]], of: Sequence[str] = (), among: Sequence[str] = ()) -> Any:
    """All are tests; those are slow whose pairs of values others have, too.

    ``of``: the pairs that count have one of these options; other tests have the rest. ``among``: and both are of these.
    """
    beyond = [case.microbatches - num_stages for num_stages, case in cases]
    names = among or (*OPTIONS, "lookahead", "staleness", "slack", "drains")
    rows = [
        {name: getattr(case, name) for name in names} | {"num_stages": num_stages, "beyond": more}
        for (num_stages, case), more in zip(cases, beyond, strict=True)
    ]
    kept = covering(rows, of)
    return parametrized(cases, [() if i in kept else pytest.mark.slow for i in range(len(cases))])


def over(stages: tuple[int, ...], cases_of: Any) -> list[tuple[int, Case]]:
    return list(itertools.chain.from_iterable(cases_of(num_stages) for num_stages in stages))


@few_of(over(STAGES, asynchronous))
def test_asynchronous_pipeline(engine_pools: EnginePools, num_stages: int, case: Case) -> None:
    check(engine_pools, num_stages, case)


@few_of(over(STAGES_SYNCHRONOUS, synchronous), of=["num_stages", "lookahead"])
def test_synchronous_pipeline(engine_pools: EnginePools, num_stages: int, case: Case) -> None:
    check(engine_pools, num_stages, case)


@pytest.mark.parametrize(("cut", "counts"), [("even", [6, 3]), ("front", [8, 1]), ("back", [1, 8])])
def test_the_cut_is_the_one_that_was_asked_for(engine_pools: EnginePools, cut: str, counts: list[int]) -> None:
    case = Case(2, cut=cut, batch_sizes=(4, 4))
    assert case.counts(2) == counts
    last, first = engine_pools.run(case, 2)
    layers = {int(name.partition(".")[0]) for name in first["weights"]}
    assert max(layers) < counts[0] <= min(int(name.partition(".")[0]) for name in last["weights"])


def with_held_microbatches(num_stages: int) -> list[tuple[int, Case]]:
    """Every slack about its limits, and drains at any moment."""
    rules: list[tuple[Staleness, Slack]] = [("least", slack) for slack in (0, 1, 2, num_stages - 1, num_stages)]
    rules += [("least", "exact"), ("least", 2 * num_stages + 2)]
    cases = []
    for i, (_, case) in enumerate(asynchronous(num_stages)):
        staleness, slack = rules[i % len(rules)]
        changes: dict[str, Any] = {
            "nan_at": case.nan_at if slack == "exact" else None,
            "drains": (i % 4,) if i % 2 else (),
        }
        cases.append((num_stages, replace(case, staleness=staleness, slack=slack, **changes)))
    return cases


@few_of(over((2, 3), with_held_microbatches), of=["staleness", "slack", "accumulate", "tied"], among=ABOUT_UPDATES)
def test_held_microbatches(engine_pools: EnginePools, num_stages: int, case: Case) -> None:
    check(engine_pools, num_stages, case)


@pytest.mark.slow
@parametrized(with_held_microbatches(4))
def test_held_microbatches_of_four(engine_pools: EnginePools, num_stages: int, case: Case) -> None:
    check(engine_pools, num_stages, case)


@pytest.mark.parametrize("empty", [(0,), (2,)])
def test_stages_that_step_ahead_are_clipped_after_a_batch_without_samples(
    engine_pools: EnginePools, empty: tuple[int, ...]
) -> None:
    sizes = tuple(0 if i in empty else 6 for i in range(5))
    case = Case(3, staleness="least", batch_sizes=sizes, max_norm=0.01, optimizer="counting", drains=(1,))
    check(engine_pools, 2, case)
    unclipped = run_oracle(replace(case, max_norm=None), 2)[0]
    assert any((a != b).any() for a, b in zip(unclipped.values(), run_oracle(case, 2)[0].values()))


@pytest.mark.slow
@parametrized(over(STAGES, grid))
def test_full_grid(engine_pools: EnginePools, num_stages: int, case: Case) -> None:
    check(engine_pools, num_stages, case)


def test_the_comparison_can_fail(engine_pools: EnginePools) -> None:
    """Weights of a run without the delay, or with another order of dropout, are told apart."""
    case = Case(3, dropout=0.2)
    results = engine_pools.run(case, 1)
    for other in (Case(3, dropout=0.2, delay=0), Case(3, dropout=0.2, seed=6)):
        with pytest.raises(AssertionError, match="not bitwise equal"):
            assert_same_weights(results, run_oracle(other)[0])
    assert not any((value == 0).all() for value in weights_of(results).values())
