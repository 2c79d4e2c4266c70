"""The engine computes the same as the oracle, bitwise in fp32, with any pipeline.

All stages run in this process, with the engine that tests/core/test_processes.py runs on several ranks.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.checkpoint import load_pipeline_state, stage_pipeline_state
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Slack, Staleness, largest_lookahead
from lightning_asyncpp.core.updates.mini_batch import MiniBatch
from lightning_asyncpp.errors import NonFiniteGradientError
from tests.helpers.cases import DIM, Case, Routed, make
from tests.helpers.engine import Training, assert_same_losses, assert_same_weights, run_local, run_oracle, weights_of
from tests.helpers.random_cases import draw, pairwise

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

ALONE = Mesh(1, 1, 0)
BATCH_SIZES = (
    (9, 9, 9, 9, 4),  # a partial last batch
    (7, 1, 5, 7, 2),  # batches with fewer samples than microbatches
    (6, 6, 6, 0, 6),  # a batch without samples
    (5,),  # a run that ends before the first update is due
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "batch_sizes": BATCH_SIZES,
    "max_norm": (None, 0.3, 100.0),
    "error_feedback": (None, 1.0, 0.5),
    "scheduler": (True, False),
    "optimizer": ("adamw", "muon", "counting"),
    "accumulate": (1, 2),
    "dropout": (0.0, 0.3),
    "start": (0, 2),
    "random_input": (False, True),
    "unequal_weights": (True, False),
    "nan_at": (None, 2),
    "checkpointing": (False, True),
    "spare": (False, True),
    "tied": (False, True),
    "routed": (False, True),
    "bf16": (False, True),
    "cut": ("even", "front", "back"),
    "drains": ((), (1,), (0, 2, 3)),
    "evaluates": ((), (1,)),
    "resumes": ((), (3,)),
}


def check(num_stages: int, case: Case) -> dict[str, Any]:
    """Check that a run's weights and losses are the oracle's; return the run's results."""
    result = run_local(case, num_stages)
    weights, losses = run_oracle(case, num_stages)
    assert_same_weights([result], weights)
    assert_same_losses([result], losses)
    return result


def make_case(microbatches: int, lookahead: int | None, options: dict[str, Any], delay: int = 1) -> Case:
    if options["nan_at"] is not None and options["nan_at"] >= len(options["batch_sizes"]):
        options = options | {"nan_at": None}
    return Case(microbatches, lookahead, delay, **options)


def asynchronous(num_stages: int) -> list[tuple[int, Case]]:
    p = num_stages
    factors = {
        "microbatches": sorted({p, p + 1, 2 * p + 1, 3 * p}),
        "lookahead": sorted({0, 1, p - 1, p, 3 * p}),
        **OPTIONS,
    }
    cases = []
    for row in pairwise(factors, seed=num_stages):
        microbatches, lookahead = row.pop("microbatches"), row.pop("lookahead")
        most = largest_lookahead(num_stages, microbatches, 1)
        cases.append((num_stages, make_case(microbatches, min(lookahead, most), row)))
    return cases


def with_stale_microbatches(num_stages: int) -> list[tuple[int, Case]]:
    """Return cases with slacks around their limits, and with drains after different batches."""
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


def grid(num_stages: int) -> Iterator[tuple[int, int, int]]:
    """Yield all numbers of microbatches from P to 2 P + 1, each with all lookaheads that fit."""
    for microbatches in range(num_stages, 2 * num_stages + 2):
        for lookahead in range(largest_lookahead(num_stages, microbatches, 1) + 1):
            yield num_stages, microbatches, lookahead


def over(stages: tuple[int, ...], cases_of: Callable[[int], list[tuple[int, Case]]]) -> Any:
    rows = [
        pytest.param(num_stages, case, id=f"P{num_stages}-m{case.microbatches}-c{case.lookahead}-{i}")
        for i, (num_stages, case) in enumerate(itertools.chain.from_iterable(map(cases_of, stages)))
    ]
    return pytest.mark.parametrize(("num_stages", "case"), rows)


@over((4,), asynchronous)
def test_uniform_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@over((3,), with_stale_microbatches)
def test_least_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "microbatches", "lookahead"), [*grid(2), *grid(3)])
def test_full_grid(num_stages: int, microbatches: int, lookahead: int) -> None:
    """Every shape computes the same as the oracle with every pair of values of two options."""
    for row in pairwise(OPTIONS, seed=100 * microbatches + lookahead):
        check(num_stages, make_case(microbatches, lookahead, row))


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[] if k < 33 else pytest.mark.slow) for k in range(400)])
def test_random_case(seed: int) -> None:
    """The engine equals the oracle with random layers, cuts and options, and random drains, evaluations and resumes."""
    num_stages, case = draw(seed)
    check(num_stages, replace(case, data_parallel_size=1))


def layers(*kinds: str) -> partial[nn.Sequential]:
    return partial(make, tuple((kind, "tensor") for kind in kinds))


def frozen_and_shared(_: float) -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)), nn.Linear(DIM, 1))
    model[1].weight = model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    return model


SHARED_BY_ALL = layers("linear", "projection", "as first", "as first", "experts", "as first", "as first")
NOT_THE_FIRST = Case(
    4, model=layers("projection", "linear", "projection", "as last"), cut=(1, 2, 2), drains=(2,), max_norm=0.3
)
EVERYWHERE = Case(3, model=layers("linear", *["same module"] * 4), max_norm=0.3, error_feedback=1.0)
INSIDE = Case(3, model=layers("linear", "inside"), error_feedback=1.0, resumes=(2,))
REPEATED = {
    "a dropout layer draws anew in each place": (
        2, Case(3, model=layers("linear", "same dropout", "linear", "same dropout"), dropout=0.3),
    ),
    "two stages share that are not the first": (3, replace(NOT_THE_FIRST, error_feedback=0.7)),
    "they share in bf16": (3, replace(NOT_THE_FIRST, bf16=True)),
    "three stages share a weight": (
        3, Case(4, model=SHARED_BY_ALL, cut=(2, 2, 4), error_feedback=0.7, max_norm=0.3, drains=(2,), resumes=(3,)),
    ),
    "three of four share, with empty microbatches": (
        4, Case(12, model=SHARED_BY_ALL, cut=(2, 2, 3, 1), batch_sizes=(7, 8, 9, 2)),
    ),
    "four stages share, accumulating": (
        4, Case(4, model=SHARED_BY_ALL, cut=(3, 1, 1, 3), max_norm=0.3, accumulate=2, batch_sizes=(8,) * 6),
    ),
    "four share in bf16, checkpointed": (
        4, Case(4, model=SHARED_BY_ALL, cut=(2, 1, 2, 3), bf16=True, checkpointing=True),
    ),
    "one layer on three stages": (3, replace(EVERYWHERE, cut=(2, 2, 2))),
    "two names in a layer are saved as one": (2, INSIDE),
    "with masters both names stand for the version": (2, replace(INSIDE, bf16=True)),
    "frozen weights are shared by any number": (
        3, Case(4, model=frozen_and_shared, cut=(1, 1, 2), bf16=True, error_feedback=1.0, resumes=(1,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_layers_may_stand_anywhere_and_share_anything(name: str) -> None:
    check(*REPEATED[name])


def test_all_uses_of_a_layer_count() -> None:
    """Without a delay, the oracle itself gives the weights of plain backwards over whole batches."""
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


class CountsSometimes(Routed):
    """Layer that counts only some microbatches, and replaces its buffer at every update, even if it counted none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > 3 else x

    def update_from_statistics(self, totals: Tensor) -> None:
        self.bias = self.bias + 0.05 * torch.sign(totals[:3] - 2).to(self.bias)


def counting_sometimes(_: float) -> nn.Sequential:
    torch.manual_seed(5)
    counting = [CountsSometimes(), nn.Linear(DIM, DIM), CountsSometimes()]
    return nn.Sequential(nn.Linear(DIM, DIM), *counting, nn.Linear(DIM, 1))


@pytest.mark.parametrize("options", [{}, {"bf16": True, "resumes": (1,)}, {"drains": (1,)}])
def test_a_layer_that_counts_nothing_in_a_mini_batch_learns_from_that(options: dict[str, Any]) -> None:
    result = check(2, Case(3, model=counting_sometimes, batch_sizes=(3,) * 6, nan_at=3, **options))
    assert 0 in {metrics["samples"] for metrics in result["statistics"]}


@pytest.mark.parametrize("empty", [0, 2])
def test_stages_that_step_ahead_are_clipped_after_a_batch_without_samples(empty: int) -> None:
    sizes = tuple(0 if i == empty else 6 for i in range(5))
    case = Case(3, staleness="least", batch_sizes=sizes, max_norm=0.01, optimizer="counting", drains=(1,))
    check(2, case)
    unclipped = run_oracle(replace(case, max_norm=None), 2)[0]
    assert any((a != b).any() for a, b in zip(unclipped.values(), run_oracle(case, 2)[0].values()))


def trained(case: Case, num_stages: int, batches: int) -> Training:
    training = Training(case, ALONE, num_stages)
    for i in range(batches):
        training.complete([training.engine.run(case.batch(i), case.step(training.model))])
    training.drain()
    return training


def test_a_gradient_that_was_left_out_has_no_norm_to_clip_by() -> None:
    """A resumed run whose stages step ahead clips by the norm of the newest update that was not skipped."""
    training = trained(Case(3, staleness="least", slack="exact", max_norm=0.5, nan_at=3), 2, 4)
    assert len(training.norms) == 3
    assert training.engine.state_dict()["norm"] == training.norms[-1]


@pytest.mark.parametrize("bf16", [False, True])
def test_an_evaluation_sees_the_newest_weights(bf16: bool) -> None:
    """It does not see the masters, which with Error Feedback are not the weights: their loss is 3.6 instead of 3.1."""
    case = Case(3, bf16=bf16, error_feedback=1.0)
    training, model = trained(case, 2, 4), case.make_model()
    oracles = run_oracle(replace(case, batch_sizes=case.batch_sizes[:4]), 2)[0]
    model.load_state_dict(training.engine.weights.for_evaluation() or oracles, strict=False)
    with case.context(), torch.no_grad():
        expected = case.step(model)(case.batch(4))
    loss = training.evaluate(4)
    assert loss is not None
    torch.testing.assert_close(loss, expected, rtol=0.02 if bf16 else 1e-6, atol=0)


@pytest.mark.parametrize("num_stages", [None, 2])
def test_an_evaluation_draws_the_same_numbers_in_a_resumed_run(num_stages: int | None) -> None:
    training = Training(Case(3, random_input=True), ALONE, num_stages)
    first = training.evaluate(0)
    resumed = training.resumed().evaluate(0)
    assert first != resumed == training.evaluate(0)


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_changed_between_batches_are_the_next_ones(bf16: bool) -> None:
    """A change in place, or to other memory, has the same effect as a change in the optimizer's step."""
    trained_weights = []
    for in_step in (True, False):
        training = Training(Case(3, delay=0, bf16=bf16, optimizer="counting"), ALONE)

        def shrink(*_: object, training: Training = training) -> None:
            for parameter in training.model.parameters():
                with torch.no_grad():
                    if bf16:
                        parameter.mul_(0.9)
                    else:
                        parameter.set_(0.9 * parameter)

        if in_step:
            training.optimizer.register_step_post_hook(shrink)
        for i in range(3):
            training.complete([training.engine.run(training.case.batch(i), training.case.step(training.model))])
            if not in_step:
                shrink()
        trained_weights.append(list(training.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*trained_weights, strict=True))


@pytest.mark.parametrize("host_knows", [True, False])
def test_no_weight_takes_a_nan_of_a_step_ahead(host_knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if only the device knows of the NaN so far."""
    known = MiniBatch._is_finite
    if not host_knows:
        monkeypatch.setattr(MiniBatch, "_is_finite", lambda mini_batch: torch.tensor(bool(known(mini_batch))))
    case = Case(3, staleness="least")
    training, data = Training(case, ALONE, 2), replace(case, nan_at=2)
    with pytest.raises(NonFiniteGradientError):  # noqa: PT012
        for i in range(5):
            training.complete([training.engine.run(data.batch(i), case.step(training.model))])
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


@pytest.mark.parametrize(("options", "rooms"), [({}, [2, 2]), ({"staleness": "least"}, [2, 1]), ({"delay": 0}, [1, 1])])
def test_a_stage_without_old_gradients_keeps_one_version(options: dict[str, Any], rooms: list[int]) -> None:
    engine = Training(Case(4, **options), ALONE, 2).engine
    assert [part.weights.num_versions for part in engine.stages] == rooms


def test_a_weight_without_an_older_version_in_a_checkpoint_is_its_own() -> None:
    case = Case(3, model=layers("linear", "inside"))
    state = stage_pipeline_state(trained(case, 1, 2).session)
    kept = state["older_weights"].pop("1.inner.first.weight")
    other = Training(case, ALONE, 1)
    newest = other.model.state_dict()
    load_pipeline_state(other.session, state)
    older = other.engine.weights.older()
    assert torch.equal(older["1.inner.first.weight"], newest["1.inner.first.weight"])
    assert not torch.equal(kept, newest["1.inner.first.weight"])
    assert torch.equal(older["0.inner.weight"], state["older_weights"]["0.inner.weight"])


def test_a_batch_costs_what_an_earlier_one_did() -> None:
    """The test counts function calls instead of seconds, since their number does not depend on the machine."""
    case = Case(4, batch_sizes=(8,) * 40)
    training = Training(case, ALONE, 3)
    calls: list[int] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        calls[-1] += event in ("call", "c_call")

    for i in range(40):
        calls.append(0)
        sys.setprofile(note)
        try:
            training.complete([training.engine.run(case.batch(i), case.step(training.model))])
        finally:
            sys.setprofile(None)
    training.drain()
    assert min(calls[35:]) <= 1.02 * min(calls[5:10])


def test_the_comparison_can_fail() -> None:
    """The comparison fails for the weights of a run without the delay, or with another seed of dropout."""
    case = Case(3, dropout=0.2)
    results = [run_local(case, 1)]
    for other in (Case(3, dropout=0.2, delay=0), Case(3, dropout=0.2, seed=6)):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_same_weights(results, run_oracle(other)[0])
    assert not any((value == 0).all() for value in weights_of(results).values())
