"""The engine computes what the oracle computes, bitwise in fp32, whatever the pipeline looks like.

All stages run in this process; `test_processes.py` runs a few of the cases over several.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_asyncpp.core.checkpoint import load_pipeline_state, stage_pipeline_state
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Slack, Staleness, largest_lookahead
from lightning_asyncpp.errors import ConfigurationError
from tests.helpers.cases import DIM, Case, Routed, make
from tests.helpers.engine import (
    Training,
    assert_equals_oracle,
    assert_same_weights,
    run_local,
    run_oracle,
    weights_of,
)
from tests.helpers.pairwise import pairwise
from tests.helpers.random_cases import draw

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

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
"""Values of every option of a run; every two of them meet in some case."""


def check(num_stages: int, case: Case) -> None:
    assert_equals_oracle([run_local(case, num_stages)], case, num_stages)


def make_case(microbatches: int, lookahead: int | None, options: dict[str, Any], delay: int = 1) -> Case:
    if options["nan_at"] is not None and options["nan_at"] >= len(options["batch_sizes"]):
        options = options | {"nan_at": None}
    return Case(microbatches, lookahead, delay, **options)


def delayed(num_stages: int) -> list[Case]:
    p = num_stages
    factors = {
        "microbatches": sorted({p, p + 1, 2 * p, 2 * p + 1, 4 * p}),
        "lookahead": sorted({0, 1, p - 1, p, 2 * p - 1, 3 * p}),
        **OPTIONS,
    }
    cases = []
    for row in pairwise(factors, seed=num_stages):
        microbatches, lookahead = row.pop("microbatches"), row.pop("lookahead")
        cases.append(make_case(microbatches, min(lookahead, largest_lookahead(p, microbatches, 1)), row))
    return cases


def without_delay(num_stages: int) -> list[Case]:
    microbatches = sorted({1, max(num_stages - 1, 1), 2 * num_stages + 1})
    factors = {"microbatches": microbatches, "lookahead": (None, 1), **OPTIONS, "batch_sizes": BATCH_SIZES[:2]}
    rows = pairwise(factors, seed=num_stages)
    return [make_case(row.pop("microbatches"), row.pop("lookahead"), row, delay=0) for row in rows]


def with_held_microbatches(num_stages: int) -> list[Case]:
    """Every slack about its limits, and drains at any moment."""
    rules: list[tuple[Staleness, Slack]] = [("least", slack) for slack in (0, 1, 2, num_stages - 1, num_stages)]
    rules += [("least", "exact"), ("least", 2 * num_stages + 2)]
    cases = []
    for i, case in enumerate(delayed(num_stages)):
        staleness, slack = rules[i % len(rules)]
        nan_at, drains = case.nan_at if slack == "exact" else None, (i % 4,) if i % 2 else ()
        cases.append(replace(case, staleness=staleness, slack=slack, nan_at=nan_at, drains=drains))
    return cases


def each(stages: Iterable[int], cases_of: Any) -> Any:
    rows = [
        pytest.param(num_stages, case, id=f"P{num_stages}-m{case.microbatches}-c{case.lookahead}-{i}")
        for num_stages in stages
        for i, case in enumerate(cases_of(num_stages))
    ]
    return pytest.mark.parametrize(("num_stages", "case"), rows)


@each((1, 2, 3, 4), delayed)
def test_uniform_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@each((1, 2, 3, 4), without_delay)
def test_no_delay(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@each((2, 3, 4), with_held_microbatches)
def test_least_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[] if k < 60 else pytest.mark.slow) for k in range(400)])
def test_random_case(seed: int) -> None:
    """With layers, drains, evaluations and resumes wherever they fall."""
    num_stages, case = draw(seed)
    check(num_stages, replace(case, data_parallel_size=1))


@settings(max_examples=15)
@given(
    drains=st.sets(st.integers(0, 5), min_size=1).map(lambda steps: tuple(sorted(steps))),
    extra=st.integers(0, 2), accumulate=st.sampled_from([1, 2]), feedback=st.sampled_from([None, 1.0]),
    rule=st.sampled_from([("uniform", 0), ("least", 0), ("least", 1), ("least", "exact")]),
)  # fmt: skip
def test_drains_do_not_change_the_result(
    drains: tuple[int, ...], extra: int, accumulate: int, feedback: float | None, rule: tuple[Staleness, Slack]
) -> None:
    case = Case(
        3 + extra, drains=drains, accumulate=accumulate, error_feedback=feedback, staleness=rule[0], slack=rule[1],
        max_norm=0.5, scheduler=True, dropout=0.1, batch_sizes=(7, 7, 7, 7, 7, 3),
    )  # fmt: skip
    assert_equals_oracle([run_local(case, 3)], replace(case, drains=()), 3)


@pytest.mark.parametrize("empty", [(0,), (2,)])
def test_stages_that_step_ahead_are_clipped_after_a_batch_without_samples(empty: tuple[int, ...]) -> None:
    sizes = tuple(0 if i in empty else 6 for i in range(5))
    case = Case(3, staleness="least", batch_sizes=sizes, max_norm=0.01, optimizer="counting", drains=(1,))
    check(2, case)
    unclipped = run_oracle(replace(case, max_norm=None), 2)[0]
    assert any((a != b).any() for a, b in zip(unclipped.values(), run_oracle(case, 2)[0].values()))


def test_the_comparison_can_fail() -> None:
    """Weights of a run without the delay, or with another order of dropout, are told apart."""
    case = Case(3, dropout=0.2)
    results = [run_local(case, 2)]
    for other in (Case(3, dropout=0.2, delay=0), Case(3, dropout=0.2, seed=6)):
        with pytest.raises(AssertionError, match="not bitwise equal"):
            assert_same_weights(results, run_oracle(other)[0])
    assert not any((value == 0).all() for value in weights_of(results).values())


def layers(*kinds: str) -> partial[nn.Sequential]:
    return partial(make, tuple((kind, "tensor") for kind in kinds))


class CountsSometimes(Routed):
    """Its buffer becomes another one with every update, also where it counted nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > 3 else x

    def update_from_statistics(self, totals: Tensor) -> None:
        self.bias = self.bias + 0.05 * torch.sign(totals[:3] - 2).to(self.bias)


def counting_sometimes(_: float) -> nn.Sequential:
    torch.manual_seed(5)
    counting = [CountsSometimes(), nn.Linear(DIM, DIM), CountsSometimes()]
    return nn.Sequential(nn.Linear(DIM, DIM), *counting, nn.Linear(DIM, 1))


def frozen_and_shared(_: float) -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)), nn.Linear(DIM, 1))
    model[1].weight = model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    return model


DROPOUT_TWICE = layers("linear", "same dropout", "linear", "same dropout")
NOT_THE_FIRST = layers("projection", "linear", "projection", "as last")
SHARED_BY_ALL = layers("linear", "projection", "as first", "as first", "experts", "as first", "as first")
SAME_LAYER = layers("linear", *["same module"] * 4)
TWO_NAMES = partial(make, (("linear", "tensor"), ("inside", "tensor")))
SHARING = {
    "a dropout layer in two places": Case(3, model=DROPOUT_TWICE, dropout=0.3, cut=(3, 4)),
    "shared by stages 1 and 2": Case(
        4, model=NOT_THE_FIRST, cut=(1, 2, 2), drains=(2,), error_feedback=0.7, max_norm=0.3
    ),
    "shared by stages 1 and 2, masters": Case(4, model=NOT_THE_FIRST, cut=(1, 2, 2), bf16=True),
    "shared by three, resumed": Case(4, model=SHARED_BY_ALL, cut=(2, 2, 4), error_feedback=0.7, resumes=(3,)),
    "shared by four": Case(4, model=SHARED_BY_ALL, cut=(3, 1, 1, 3), max_norm=0.3, accumulate=2, batch_sizes=(8,) * 6),
    "shared by four, masters": Case(4, model=SHARED_BY_ALL, cut=(2, 1, 2, 3), bf16=True, checkpointing=True),
    "shared by three, no delay": Case(4, model=SHARED_BY_ALL, cut=(4, 1, 3), delay=0, max_norm=0.3),
    "one layer on three stages": Case(3, model=SAME_LAYER, cut=(2, 2, 2), max_norm=0.3, error_feedback=1.0),
    "one layer four times on one stage": Case(3, model=SAME_LAYER, cut=(6,), max_norm=0.3, error_feedback=1.0),
    "two names in a layer, resumed": Case(3, model=TWO_NAMES, cut=(1, 2), error_feedback=1.0, resumes=(2,)),
    "two names in a layer, masters": Case(3, model=TWO_NAMES, cut=(1, 2), bf16=True, error_feedback=1.0, resumes=(2,)),
    "frozen and shared": Case(4, model=frozen_and_shared, cut=(1, 1, 2), bf16=True, error_feedback=1.0, resumes=(1,)),
    "counts nothing in a mini-batch": Case(
        3, model=counting_sometimes, cut=(2, 3), batch_sizes=(3,) * 6, nan_at=3, bf16=True, resumes=(1,), drains=(1,)
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_or_stand_in_several_places(name: str) -> None:
    """Uses are added from the last layer to the first, wherever the model is cut."""
    case = SHARING[name]
    check(len(case.cut), case)


def test_all_uses_count() -> None:
    """The reference itself: against plain backward passes over a whole batch, without a delay."""
    case = Case(1, delay=0, model=layers("linear", *["same module"] * 3, "as first"), optimizer="counting")
    model = case.make_model()
    optimizer = case.make_base(model.parameters())
    for i in range(len(case.batch_sizes)):
        optimizer.zero_grad()
        case.step(model)(case.batch(i)).backward()
        optimizer.step()
    expected, _ = run_oracle(case)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.detach(), rtol=0, atol=1e-5)


def trained(case: Case, batches: int = 2, stages: int | None = None) -> Training:
    training = Training(case, Mesh(1, 1, 0), stages)
    for i in range(batches):
        training.complete([training.engine.run(case.batch(i), case.step(training.model))])
    training.drain()
    return training


def test_a_gradient_that_was_left_out_has_no_norm_to_clip_by() -> None:
    """A run that goes on with stages that step ahead clips by the norm of the newest update."""
    case = Case(3, staleness="least", slack="exact", max_norm=0.5, nan_at=3, batch_sizes=(8, 8, 8, 8))
    training = trained(case, 4, stages=2)
    assert len(training.norms) == 3
    assert training.engine.state_dict()["norm"] == training.norms[-1]


@pytest.mark.parametrize(("options", "rooms"), [({}, [2, 2]), ({"staleness": "least"}, [2, 1]), ({"delay": 0}, [1, 1])])
def test_a_stage_without_old_gradients_keeps_one_version(options: dict[str, Any], rooms: list[int]) -> None:
    engine = Training(Case(4, **options), Mesh(1, 1, 0), 2).engine
    assert [part.weights.room for part in engine.parts] == rooms


def test_weights_kept_in_another_way_are_refused() -> None:
    case = Case(3, model=TWO_NAMES)
    state = {**stage_pipeline_state(trained(case).session), "weight_dtype": "bf16"}
    with pytest.raises(ConfigurationError, match="written with weight_dtype='bf16', this run has None"):
        load_pipeline_state(Training(case, Mesh(1, 1, 0)).session, state)


def test_a_weight_without_an_older_version_is_its_own() -> None:
    case = Case(3, model=TWO_NAMES)
    state = stage_pipeline_state(trained(case).session)
    kept = state["older_weights"].pop("1.inner.first.weight")
    other = Training(case, Mesh(1, 1, 0))
    newest = other.model.state_dict()
    load_pipeline_state(other.session, state)
    older = other.engine.weights.older() or {}
    assert torch.equal(older["1.inner.first.weight"], newest["1.inner.first.weight"])
    assert not torch.equal(kept, newest["1.inner.first.weight"])
    assert torch.equal(older["0.inner.weight"], state["older_weights"]["0.inner.weight"])


def test_a_long_run_costs_per_mini_batch_what_a_short_one_does() -> None:
    """Calls of Python functions are counted, not seconds."""
    case = Case(4, batch_sizes=(8,) * 60, optimizer="counting", staleness="least")
    training = Training(case, Mesh(1, 1, 0), 3)
    counts = [0] * 60

    def note(frame: Any, event: str, argument: Any) -> None:
        counts[i] += event in ("call", "c_call")

    for i in range(60):
        batch, step = case.batch(i), case.step(training.model)
        sys.setprofile(note)
        try:
            training.session.complete(note=[training.engine.run(batch, step), training.engine.mini_batch][1])
        finally:
            sys.setprofile(None)
    assert min(counts[50:]) <= 1.02 * min(counts[5:15])
