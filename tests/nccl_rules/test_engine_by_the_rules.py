"""The engine equals the oracle, and never hangs, where its tensors travel by NCCL's rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.cases import Case
from tests.helpers.compare import assert_same_norms, assert_same_weights, check_random_case
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools, Prepare
from tests.helpers.workers import opened
from tests.nccl_rules.broken import allocate_late, receive_early, send_at_once
from tests.nccl_rules.emulated import emulate
from tests.nccl_rules.short_numbers import with_short_numbers

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

CASES = {
    "clip": Case(7, lookahead=2, max_norm=0.3, scheduler=True),
    "no-lookahead": Case(5, lookahead=0, random_input=True),
    "drains": Case(5, drains=(0, 2), evaluates=(1, 3), resumes=(3,)),
    "partial": Case(6, batch_sizes=(8, 5, 2, 1), unequal_weights=True, accumulate=2),
    "tied": Case(5, tied=True, error_feedback=1.0),
    "routed": Case(5, routed=True, dropout=0.3),
    "checkpointing": Case(5, checkpointing=True),
    "far-ahead": Case(8, staleness="least", lookahead=6, max_norm=0.5),
    "least": Case(6, staleness="least", lookahead=0, max_norm=0.3, drains=(1,), tied=True),
    "least-exact": Case(5, staleness="least", slack="exact", lookahead=1, routed=True, max_norm=0.3, nan_at=2),
    "synchronous": Case(3, delay=0, max_norm=0.3),
    "int16": Case(5, model=with_short_numbers),
}


@pytest.fixture(scope="module")
def emulated() -> Iterator[EnginePools]:
    with opened(EnginePools(emulate)) as engine_pools:
        yield engine_pools


# Over five stages, between whose middle ones a rule may be broken that two or three cannot break; the rest over three.
OF_FIVE = ("drains", "routed", "least")
ALIKE = ("clip", "no-lookahead", "far-ahead", "synchronous")  # whose options other cases have, too


def over_few_stages() -> list[Any]:
    usual = {name: 5 if name in OF_FIVE else 3 for name in CASES}
    return [
        pytest.param(name, stages, marks=[] if stages == usual[name] and name not in ALIKE else pytest.mark.slow)
        for name in CASES
        for stages in (5, 2, 3, 4)
    ]


@pytest.mark.parametrize(("name", "stages"), over_few_stages())
def test_it_equals_the_oracle(emulated: EnginePools, name: str, stages: int) -> None:
    case = CASES[name]
    results = emulated.run(case, stages)
    expected, _ = run_oracle(case, stages)
    assert_same_weights(results, expected)
    assert_same_norms(results)


USUAL = (1001, 1029)  # the last with replicas


@pytest.mark.parametrize("seed", USUAL)
def test_random_case(emulated: EnginePools, seed: int) -> None:
    """With replicas, too, whose reductions are then NCCL's."""
    check_random_case(emulated, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(1000, 1100) if seed not in USUAL])
def test_more_random_cases(emulated: EnginePools, seed: int) -> None:
    check_random_case(emulated, seed)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (send_at_once, "a wait for the whole device hangs"),
        (receive_early, "hangs|a receive was issued before its send"),
        (allocate_late, "a wait for the whole device hangs"),
    ],
)
def test_a_broken_rule_is_found(broken: Prepare, found: str) -> None:
    engine_pools = EnginePools(broken)
    try:
        with pytest.raises(AssertionError, match=found):
            engine_pools.run(Case(5), 3)
    finally:
        engine_pools.close()
