"""The engine equals the oracle, and never hangs, when its messages follow NCCL's rules.

The tests run once with numbers that reach the host late, and once with one hardware queue for all streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.cases import DIM, Case
from tests.helpers.engine import assert_ranks_agree, assert_same_weights, check_random_case, run_oracle
from tests.helpers.pool import EnginePools, Prepare, opened
from tests.nccl_rules.broken import allocate_late, receive_early, send_at_once, take_together
from tests.nccl_rules.emulated import emulate
from tests.nccl_rules.late import read_late

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

Given = tuple[Tensor, Tensor, Tensor]


class Several(nn.Module):
    """Layer that returns two tensors with gradients, and int16 numbers, a dtype that NCCL does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, DIM)

    def forward(self, given: Tensor | Given) -> Given:
        if isinstance(given, Tensor):
            given = given, torch.zeros_like(given), torch.arange(len(given), dtype=torch.int16) % 8
        x, skipped, numbers = given
        return torch.tanh(x + skipped + self.embedding(numbers.long())), x, (numbers + 1) % 8


class Last(nn.Linear):
    """Last layer, which does not use the int16 numbers."""

    def forward(self, given: Given) -> Tensor:  # type: ignore[override]
        return super().forward(given[0] + given[1])


def several(dropout: float) -> nn.Sequential:
    torch.manual_seed(12)
    return nn.Sequential(*[Several() for _ in range(4)], Last(DIM, 1))


CASES = {
    "clip": Case(7, lookahead=2, max_norm=0.3, scheduler=True),
    "no-lookahead": Case(5, lookahead=0, random_input=True),
    "drains": Case(5, drains=(0, 2), evaluates=(1, 3), resumes=(3,)),
    "partial": Case(6, batch_sizes=(8, 5, 2, 1), unequal_weights=True, accumulate=2),
    "tied": Case(5, tied=True, error_feedback=1.0),
    "routed": Case(5, routed=True, dropout=0.3),
    "checkpointing": Case(5, checkpointing=True),
    "far-ahead": Case(8, staleness="least", lookahead=4, max_norm=0.5),
    "least": Case(6, staleness="least", lookahead=0, max_norm=0.3, drains=(1,), tied=True),
    "least-exact": Case(5, staleness="least", slack="exact", lookahead=1, routed=True, max_norm=0.3, nan_at=2),
    "synchronous": Case(3, delay=0, max_norm=0.3),
    "several": Case(5, model=several),
}


# On three stages, and one case on five, whose middle stages can break a rule that three stages cannot break.
USUAL = [(name, 3) for name in ("partial", "least", "least-exact", "several")] + [("drains", 5)]
OTHERS = [(name, stages) for name in CASES for stages in (2, 3, 5) if (name, stages) not in USUAL]


@pytest.fixture(scope="module", params=[read_late, partial(emulate, one_queue=True)], ids=["late", "one queue"])
def by_the_rules(request: pytest.FixtureRequest) -> Iterator[EnginePools]:
    with opened(EnginePools(request.param)) as engine_pools:
        yield engine_pools


@pytest.mark.parametrize(
    ("name", "stages"), [*USUAL, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_it_equals_the_oracle(by_the_rules: EnginePools, name: str, stages: int) -> None:
    case = CASES[name]
    results = by_the_rules.run(case, stages)
    expected, _ = run_oracle(case, stages)
    assert_same_weights(results, expected)
    assert_ranks_agree(results)


@pytest.mark.parametrize(
    "seeds", [(1029,), pytest.param((1003, *range(1030, 1060)), marks=pytest.mark.slow)], ids=["replicas", "more"]
)
def test_random_cases(by_the_rules: EnginePools, seeds: Iterable[int]) -> None:
    """Random cases equal the oracle, also with replicas, whose reductions then follow NCCL's rules."""
    for seed in seeds:
        check_random_case(by_the_rules, seed)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (send_at_once, "a wait for the whole device hangs"),
        (receive_early, "hangs|a receive was issued before its send"),
        (take_together, "compute hangs"),
        (allocate_late, "a wait for the whole device hangs"),
    ],
)
def test_a_broken_rule_is_found(broken: Prepare, found: str) -> None:
    with opened(EnginePools(broken)) as engine_pools:

        def run_often() -> None:
            for _ in range(5):  # whether ranks wait at the same time also depends on the machine's load
                engine_pools.run(CASES["several"], 3)

        with pytest.raises(AssertionError, match=found):
            run_often()
