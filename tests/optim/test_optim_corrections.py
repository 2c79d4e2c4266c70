"""Every correction against the plain reference of its formula, and what all of them share."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import (
    ErrorFeedback,
    WeightPrediction,
)
from tests.optim.correction_references import (
    BASES,
    CASES,
    STEPS,
    STOPS_WITHOUT_DELAY,
    gradients,
    make_params,
    predict,
    train,
)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("case", CASES)
def test_formula(case, base, delay):
    correction, reference, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer = correction(params.items(), BASES[base], **options)
    optimizer.set_delay(delay)
    train(optimizer, params, range(STEPS))
    expected = reference(BASES[base](twin.items()), twin, range(STEPS), delay, **options)
    for p, w in zip(params.values(), expected):
        torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_it_changes_what_the_base_does(case):
    correction, _, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer = correction(params.items(), BASES["adamw"], **options)
    optimizer.set_delay(2)
    train(optimizer, params, range(STEPS))
    train(BASES["adamw"](twin.items()), twin, range(STEPS))
    assert all(not torch.equal(p, q) for p, q in zip(params.values(), twin.values()))


@pytest.mark.parametrize("case", STOPS_WITHOUT_DELAY)
def test_fresh_gradients_are_left_to_the_base_bitwise(case):
    correction, _, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer = correction(params.items(), BASES["muon"], **options)
    optimizer.set_delay(0)
    train(optimizer, params, range(STEPS))
    train(BASES["muon"](twin.items()), twin, range(STEPS))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))
    assert not any(optimizer.state_dict()[correction.state_name].get(name) for name in correction.buffer_names)


@pytest.mark.parametrize("options", [{"ahead": 1.0}, {"ahead": 0.5, "horizon": 3.0}])
@pytest.mark.parametrize("base", BASES)
def test_prediction_looks_ahead_of_fresh_gradients_where_asked(base, options):
    params, twin = make_params(), make_params()
    optimizer = WeightPrediction(params.items(), BASES[base], **options)
    optimizer.set_delay(0)
    train(optimizer, params, range(STEPS))
    expected = predict(BASES[base](twin.items()), twin, range(STEPS), 0, **options)
    for p, w in zip(params.values(), expected):
        torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-6)
    assert optimizer.state_dict()["weight_prediction"]["predicted_step"].keys() == set(range(len(params)))


def test_looking_ahead_of_fresh_gradients_needs_no_lent_weights():
    params, twin = make_params(), make_params()
    pair = [WeightPrediction(ones.items(), BASES["adamw"], ahead=1.0) for ones in (params, twin)]
    for optimizer, ones in zip(pair, (params, twin)):
        optimizer.set_delay({p: int(name == "scale") for name, p in ones.items()})
    for step in range(STEPS):
        with pair[0].weights_before({params["scale"]: params["scale"].detach().clone()}):
            train(pair[0], params, [step])
        train(pair[1], twin, [step])
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))


def test_a_run_that_looks_ahead_of_fresh_gradients_resumes():
    params, twin = make_params(), make_params()
    optimizer, resumed = (WeightPrediction(ones.items(), BASES["adamw"], ahead=1.0) for ones in (params, twin))
    optimizer.set_delay(0)
    resumed.set_delay(0)
    train(optimizer, params, range(3))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(params.values(), twin.values()):
        q.data.copy_(p)
    train(optimizer, params, range(3, STEPS))
    train(resumed, twin, range(3, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))


@pytest.mark.parametrize("case", CASES)
def test_parameters_of_different_delays_are_corrected_each_by_its_own(case):
    correction, _, options = CASES[case]
    delays = {"up.weight": 2, "up.bias": 1, "embed.weight": 0, "scale": 2}
    mixed = make_params()
    optimizer = correction(mixed.items(), BASES["adamw"], **options)
    optimizer.set_delay({mixed[name]: delay for name, delay in delays.items()})
    train(optimizer, mixed, range(STEPS))
    for name, delay in delays.items():  # no parameter's gradient or step depends on another's here
        alike = make_params()
        twin = correction(alike.items(), BASES["adamw"], **options)
        twin.set_delay(delay)
        train(twin, alike, range(STEPS))
        assert torch.equal(mixed[name], alike[name]), name


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_that_never_has_a_gradient_stays(case):
    correction, _, options = CASES[case]
    params = make_params()
    before = params["scale"].detach().clone()
    optimizer = correction(params.items(), BASES["sgd"], **options)
    for step in range(STEPS):
        for p, g in zip(params.values(), gradients([p.detach() for p in params.values()], step)):
            p.grad = None if p is params["scale"] else g
        optimizer.step()
    assert torch.equal(params["scale"], before)


def test_prediction_is_error_feedback_but_for_the_first_update():
    params, twin = make_params(), make_params()
    feedback, prediction = ErrorFeedback(params.items(), BASES["sgd"]), WeightPrediction(twin.items(), BASES["sgd"])
    for p, q in zip(params.values(), twin.values()):  # the same gradients, whatever the weights
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    start = [p.detach().clone() for p in params.values()]
    feedback.step()
    first = [a - p.detach() for a, p in zip(start, params.values())]
    prediction.step()
    for _ in range(3):
        feedback.step()
        prediction.step()
    for p, q, u in zip(params.values(), twin.values(), first):
        torch.testing.assert_close(q.detach(), p.detach() - u)


def test_error_feedback_compares_steps_at_the_learning_rates_of_their_days():
    p = nn.Parameter(torch.zeros(1))
    optimizer = ErrorFeedback([p], partial(torch.optim.SGD, lr=1.0), strength=3.0)
    schedule = [1.0, 0.5, 0.25, 0.25]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: schedule[t])
    path = [0.0]
    for g in (1.0, 2.0, 4.0):
        p.grad = torch.tensor([g])
        optimizer.step()
        scheduler.step()
        path.append(float(p.detach()))
    u = [1.0, 0.5 * 2.0, 0.25 * 4.0]
    second = -u[0] - (u[1] + 3 * (u[1] - u[0]))
    assert path == pytest.approx([0, -u[0], second, second - (u[2] + 3 * (u[2] - u[1]))])


@pytest.mark.parametrize("case", CASES)
def test_states_saved_with_learning_rates_go_on(case):
    """As corrections kept them once."""
    correction, _, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer, resumed = (correction(ones.items(), BASES["adamw"], **options) for ones in (params, twin))
    train(optimizer, params, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    state[correction.state_name]["learning_rates"] = [0.01]
    resumed.load_state_dict(state)
    for p, q in zip(params.values(), twin.values()):
        q.data.copy_(p)
    train(optimizer, params, range(3, STEPS))
    train(resumed, twin, range(3, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))


@pytest.mark.parametrize(
    ("correction", "options", "messages"),
    [
        (ErrorFeedback, {"strength": -1, "buffer_dtype": "int8"}, ["strength must be at least 0", "buffer_dtype must"]),
        (WeightPrediction, {"horizon": -1, "ahead": -1}, ["horizon must be", "ahead must be"]),
    ],
)
def test_wrong_arguments_are_named_all_at_once(correction, options, messages):
    with pytest.raises(ValueError, match=f"{correction.__name__} cannot be set up") as caught:
        correction(make_params().items(), BASES["adamw"], **options)
    assert all(message in str(caught.value) for message in messages)
    with pytest.raises(TypeError, match="already made"):
        correction(make_params().items(), torch.optim.AdamW(make_params().values()))


def test_a_delay_that_is_no_whole_number_of_at_least_0_is_refused():
    params = make_params()
    optimizer = ErrorFeedback(params.items(), BASES["adamw"])
    with pytest.raises(ValueError, match="cannot be -1 updates old"):
        optimizer.set_delay({params["scale"]: -1})
    with pytest.raises(ValueError, match=r"cannot be 2\.0 updates old: delay must be a whole number"):
        optimizer.set_delay(2.0)


@pytest.mark.parametrize("ahead", [0.0, 1.0])
@pytest.mark.parametrize("resume_at", [None, 3, 4])
def test_a_prediction_goes_on_along_the_trajectory_of_the_base_when_a_delay_begins(ahead, resume_at):
    """W = Y - (h + a) v with the h of the day; resumed at the change of the delay, and after it."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = WeightPrediction([p], partial(torch.optim.SGD, lr=0.1), ahead=ahead)
    base = torch.zeros(2, dtype=torch.float64)
    for t in range(6):
        if t == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = WeightPrediction([p], partial(torch.optim.SGD, lr=0.1), ahead=ahead)
            optimizer.set_delay(int(t > 3))
            optimizer.load_state_dict(state)
        delay = int(t >= 3)
        optimizer.set_delay(delay)
        p.grad = torch.full((2,), t + 1.0, dtype=torch.float64)
        optimizer.step()
        base -= 0.1 * (t + 1)
        torch.testing.assert_close(p.detach(), base - (delay + ahead) * 0.1 * (t + 1))


def test_that_nothing_is_corrected_is_said_when_a_step_is_taken_so(monkeypatch):
    messages = []
    monkeypatch.setattr("lightning_asyncpp.optim.correction.rank_zero_info", messages.append)
    params = make_params()
    optimizer = WeightPrediction(params.items(), BASES["adamw"])
    optimizer.set_delay(0)  # before a checkpoint tells how far the run is
    optimizer.set_delay(1)
    train(optimizer, params, range(2))
    assert messages == []
    optimizer.set_delay(0)
    train(optimizer, params, range(2))
    assert len(messages) == 1


@pytest.mark.parametrize("case", CASES)
def test_sparse_gradients_are_corrected_as_dense_ones(case):
    correction, _, options = CASES[case]
    weights = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=sparse)
        optimizer = correction(table.named_parameters(), partial(torch.optim.SGD, lr=0.1), **options)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([0, 2, 3]) + step % 2).square().sum().backward()
            optimizer.step()
        weights.append(table.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])


def test_a_base_without_a_learning_rate_is_corrected_too():
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1)

    p = nn.Parameter(torch.zeros(()))
    optimizer = ErrorFeedback([p], Fixed)
    for g in (1.0, 3.0):
        p.grad = torch.tensor(g)
        optimizer.step()
    assert float(p) == pytest.approx(-0.1 - 0.3 - 0.2)


def test_a_correction_inside_itself_is_refused():
    with pytest.raises(ValueError, match="ErrorFeedback inside ErrorFeedback"):
        ErrorFeedback(make_params().items(), partial(ErrorFeedback, base=BASES["adamw"]))
