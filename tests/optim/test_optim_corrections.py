"""Every correction against a plain reference of its formula, and what all of them share."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import (
    DelayCompensation,
    ErrorFeedback,
    GradientExtrapolation,
    LearningRateDiscount,
    Lion,
    MuonAdamW,
    NesterovLookAhead,
    WeightPrediction,
)
from lightning_asyncpp.optim.newton_schulz import orthogonalize

SHAPES = {"up.weight": (6, 4), "up.bias": (6,), "embed.weight": (5, 4), "scale": ()}
BASES = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "muon": partial(MuonAdamW, lr=0.02, newton_schulz_dtype="float32"),
}
STEPS = 7


def make_params():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(weights, step):
    """Gradients that depend on the weights, so that a wrong weight shows."""
    noise = [
        torch.randn(w.shape, generator=torch.Generator().manual_seed(100 * step + i)) for i, w in enumerate(weights)
    ]
    return [w.sin() + n for w, n in zip(weights, noise)]


def train(optimizer, params, steps):
    for step in steps:
        for p, g in zip(params.values(), gradients([p.detach() for p in params.values()], step)):
            p.grad = g
        optimizer.step()


def base_step(base, params, weights, grads):
    """u_t: what the base subtracts from ``weights``."""
    for p, w, g in zip(params.values(), weights, grads):
        p.data.copy_(w)
        p.grad = g.clone()
    base.step()
    return [w - p.detach() for w, p in zip(weights, params.values())]


def predict(base, params, steps, delay, horizon=None, smoothing=0.0):
    weights = [p.detach().clone() for p in params.values()]
    y, v = [w.clone() for w in weights], None
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        v = u if v is None else [smoothing * a + (1 - smoothing) * b for a, b in zip(v, u)]
        y = [a - b for a, b in zip(y, u)]
        weights = [a - (delay if horizon is None else horizon) * b for a, b in zip(y, v)]
    return weights


def predict_by_momentum(base, params, steps, delay, source):
    """As :func:`predict`, but along the momentum that is recomputed here from all gradients."""
    weights = [p.detach().clone() for p in params.values()]
    y, m, q = [w.clone() for w in weights], [torch.zeros_like(w) for w in weights], None
    for t in steps:
        grads = gradients(weights, t)
        u = base_step(base, params, weights, grads)
        y = [a - b for a, b in zip(y, u)]
        q, m, along = along_momentum(base, grads, m, q, t)
        weights = [a - delay * b for a, b in zip(y, along)]
    return weights


def along_momentum(base, grads, m, q, t):
    """(mean squares, momenta, steps along them) after the gradients ``grads`` of update t."""
    if isinstance(base, torch.optim.SGD):
        m = [g if t == 0 else 0.9 * a + g for a, g in zip(m, grads)]
        return q, m, [0.05 * a for a in m]
    muon = isinstance(base, MuonAdamW)
    q = [torch.zeros_like(g) for g in grads] if q is None else q
    betas = (0.9, 0.95) if muon else (0.9, 0.999)
    decay = [0.95 if muon and i == 0 else betas[0] for i in range(len(grads))]  # of "up.weight", the only matrix
    m = [b * a + (1 - b) * g for a, g, b in zip(m, grads, decay)]
    q = [betas[1] * a + (1 - betas[1]) * g * g for a, g in zip(q, grads)]
    lr = base.param_groups[0]["lr"]
    corrections = [1 - beta ** (t + 1) for beta in betas]
    adam = [lr * (a / corrections[0]) / ((b / corrections[1]).sqrt() + 1e-8) for a, b in zip(m, q)]
    if muon:
        adam[0] = lr * 0.2 * max(m[0].shape) ** 0.5 * orthogonalize([m[0].unsqueeze(0)], dtype=torch.float32)[0]
    return q, m, adam


def look_ahead(base, params, steps, delay, momentum=0.99, momentum_decay=0.004):
    def c(t):
        return momentum * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    weights = [p.detach().clone() for p in params.values()]
    y = weights
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        following = [w - (1 - c(t + 1)) * a for w, a in zip(weights, u)]
        weights = [a + c(t + 2) * (a - b) for a, b in zip(following, y)]
        y = following
    return weights


def discount(base, params, steps, delay, anneal_steps, staleness=None):
    weights = [p.detach().clone() for p in params.values()]
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        power = 1 - min(t / anneal_steps, 1)
        weights = [w - a / (delay if staleness is None else staleness) ** power for w, a in zip(weights, u)]
    return weights


def compensate(base, params, steps, delay, strength=0.04, adaptive=False, decay=0.95):
    weights = [p.detach().clone() for p in params.values()]
    history, q = [weights], [torch.zeros_like(w) for w in weights]
    for t in steps:
        g = gradients(weights, t)
        q = [decay * a + (1 - decay) * b * b for a, b in zip(q, g)]
        k = [strength / (a + 1e-7).sqrt() if adaptive else strength for a in q]
        older = history[max(t - delay, 0)]
        g = [a + b * a * a * (w - o) for a, b, w, o in zip(g, k, weights, older)]
        u = base_step(base, params, weights, g)
        weights = [w - a for w, a in zip(weights, u)]
        history.append(weights)
    return weights


def extrapolate(base, params, steps, delay, strength=1.0):
    weights = [p.detach().clone() for p in params.values()]
    previous = None
    for t in steps:
        g = gradients(weights, t)
        corrected = g if previous is None else [a + strength * (a - b) for a, b in zip(g, previous)]
        previous = g
        u = base_step(base, params, weights, corrected)
        weights = [w - a for w, a in zip(weights, u)]
    return weights


def feed_back(base, params, steps, delay, strength=1.0):
    weights = [p.detach().clone() for p in params.values()]
    previous = None
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        s = 0.0 if previous is None else strength
        weights = [w - (a + s * (a - b)) for w, a, b in zip(weights, u, previous or u)]
        previous = u
    return weights


CASES = {
    "feedback": (ErrorFeedback, feed_back, {"strength": 1.5}),
    "prediction": (WeightPrediction, predict, {}),
    "prediction-2.5": (WeightPrediction, predict, {"horizon": 2.5}),
    "prediction-smooth": (WeightPrediction, predict, {"smoothing": 0.8}),
    "prediction-momentum": (WeightPrediction, predict_by_momentum, {"source": "momentum"}),
    "look-ahead": (NesterovLookAhead, look_ahead, {"momentum": 0.9, "momentum_decay": 0.5}),
    "discount": (LearningRateDiscount, discount, {"anneal_steps": 5}),
    "discount-by-3": (LearningRateDiscount, discount, {"anneal_steps": 4, "staleness": 3.0}),
    "compensation": (DelayCompensation, compensate, {"strength": 0.3}),
    "compensation-adaptive": (DelayCompensation, compensate, {"strength": 0.3, "adaptive": True, "decay": 0.5}),
    "extrapolation": (GradientExtrapolation, extrapolate, {"strength": 0.7}),
}


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


@pytest.mark.parametrize("case", CASES)
def test_fresh_gradients_are_left_to_the_base_bitwise(case):
    correction, _, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer = correction(params.items(), BASES["muon"], **options)
    optimizer.set_delay(0)
    train(optimizer, params, range(STEPS))
    train(BASES["muon"](twin.items()), twin, range(STEPS))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))
    assert not any(optimizer.state_dict()[correction.state_name].get(name) for name in correction.buffer_names)


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


@pytest.mark.parametrize("copying", ["state_dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("case", CASES)
def test_state_continues_bitwise(case, copying):
    correction, _, options = CASES[case]
    params = make_params()
    optimizer = correction(params.items(), BASES["muon"], **options)
    optimizer.set_delay(2)
    train(optimizer, params, range(4))
    if copying == "state_dict":
        twins = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
        twin = correction(twins.items(), BASES["muon"], **options)
        twin.set_delay(2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twin.load_state_dict(torch.load(file, weights_only=True))
    elif copying == "deepcopy":
        twin, twins = copy.deepcopy((optimizer, params))
    else:
        file = io.BytesIO()
        torch.save((optimizer, params), file)
        file.seek(0)
        twin, twins = torch.load(file, weights_only=False)
    train(optimizer, params, range(4, STEPS))
    train(twin, twins, range(4, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twins.values()))


@pytest.mark.parametrize("case", CASES)
def test_lent_weights_equal_the_snapshot_bitwise(case):
    correction, _, options = CASES[case]
    params, twin = make_params(), make_params()
    optimizer, other = (correction(p.items(), BASES["adamw"], **options) for p in (params, twin))
    train(other, twin, range(STEPS))
    for step in range(STEPS):
        with optimizer.weights_before({p: p.detach().clone() for p in params.values()}):
            train(optimizer, params, [step])
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twin.values()))


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


def test_corrections_may_wrap_corrections():
    params, twin = make_params(), make_params()
    inner = partial(DelayCompensation, base=BASES["adamw"], strength=0.3)
    both = ErrorFeedback(params.items(), inner)
    both.set_delay(1)
    train(both, params, range(STEPS))

    reference = inner(twin.items())
    weights, previous = [p.detach().clone() for p in twin.values()], None
    for t in range(STEPS):
        u = base_step(reference, twin, weights, gradients(weights, t))
        weights = [w - (2 * a - b if previous else a) for w, a, b in zip(weights, u, previous or u)]
        previous = u
    for p, w in zip(params.values(), weights):
        torch.testing.assert_close(p.detach(), w)

    state = copy.deepcopy(both.state_dict())
    fresh = ErrorFeedback(make_params().items(), inner)
    fresh.load_state_dict(state)
    assert fresh.state_dict().keys() == {"state", "param_groups", "error_feedback", "delay_compensation"}
    assert fresh.param_groups is fresh.base.param_groups is fresh.base.base.param_groups
    both.set_delay(0)
    assert both.base.delay == 0


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


def test_error_feedback_follows_the_schedule_where_asked():
    def run(schedule, **options):
        p = nn.Parameter(torch.zeros(1))
        optimizer = ErrorFeedback([p], partial(torch.optim.SGD, lr=1.0), **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: schedule[t])
        path = [0.0]
        for g in (1.0, 2.0, 4.0):
            p.grad = torch.tensor([g])
            optimizer.step()
            scheduler.step()
            path.append(float(p.detach()))
        return path

    schedule = [1.0, 0.5, 0.25, 0.25]
    u = [1.0, 0.5 * 2.0, 0.25 * 4.0]
    w1 = -u[0]
    plain2 = w1 - (u[1] + 3 * (u[1] - u[0]))
    assert run(schedule, strength=3.0) == pytest.approx([0, w1, plain2, plain2 - (u[2] + 3 * (u[2] - u[1]))])
    matched2 = w1 - (u[1] + (u[1] - 0.5 * u[0]))
    assert run(schedule, match_lr=True) == pytest.approx([0, w1, matched2, matched2 - (u[2] + (u[2] - 0.5 * u[1]))])
    annealed2 = w1 - (u[1] + (1 + 2 * 0.5) * (u[1] - u[0]))
    annealed3 = annealed2 - (u[2] + (1 + 2 * 0.25) * (u[2] - u[1]))
    assert run(schedule, strength=3.0, anneal=True) == pytest.approx([0, w1, annealed2, annealed3])


@pytest.mark.parametrize(
    ("correction", "options", "messages"),
    [
        (ErrorFeedback, {"strength": -1, "buffer_dtype": "int8"}, ["strength must be at least 0", "buffer_dtype must"]),
        (
            WeightPrediction,
            {"horizon": -1, "smoothing": 1.0, "source": "tea"},
            ["horizon must be", "smoothing must be in", "source must be"],
        ),
        (NesterovLookAhead, {"momentum": 1.0, "momentum_decay": -1}, ["momentum must be in", "momentum_decay must be"]),
        (LearningRateDiscount, {"anneal_steps": 0, "staleness": 0.5}, ["anneal_steps must be", "staleness must be"]),
        (DelayCompensation, {"strength": float("nan"), "decay": 1.0}, ["strength must be", "decay must be in"]),
        (GradientExtrapolation, {"strength": -0.1}, ["strength must be"]),
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


@pytest.mark.parametrize("case", CASES)
def test_a_state_of_another_correction_is_refused(case):
    correction, _, options = CASES[case]
    plain = BASES["adamw"](make_params().items())
    optimizer = correction(make_params().items(), BASES["adamw"], **options)
    with pytest.raises(ValueError, match=f"saved without {correction.__name__}"):
        optimizer.load_state_dict(plain.state_dict())


def test_the_momentum_of_an_unknown_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"knows the momentum of MuonAdamW, .*, not of Lion"):
        WeightPrediction(make_params().items(), Lion, source="momentum")


def test_groups_assigned_to_the_wrapper_reach_the_base():
    """Lightning's finetuning callbacks assign them when a run goes on."""
    params, added = make_params(), nn.Parameter(torch.ones(2))
    optimizer = ErrorFeedback(params.items(), partial(torch.optim.SGD, lr=0.1))
    groups = [*optimizer.param_groups, {**optimizer.param_groups[0], "params": [added], "lr": 0.0}]
    optimizer.param_groups = groups
    train(optimizer, params, range(2))
    assert optimizer.base.param_groups is groups
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_a_state_loaded_into_the_inner_correction_is_what_the_outer_steps_with():
    def make(outer, lr):
        params = {"w": nn.Parameter(torch.ones(4, 3))}
        inner = partial(WeightPrediction, base=partial(torch.optim.SGD, lr=lr))
        return params, ErrorFeedback(params.items(), inner) if outer else inner(params.items())

    params, saved = make(outer=False, lr=0.5)
    train(saved, params, range(2))
    params, optimizer = make(outer=True, lr=0.1)
    optimizer.base.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == optimizer.base.base.param_groups[0]["lr"] == 0.5
    optimizer.state = {}
    assert optimizer.base.base.state is optimizer.state


SCHEDULES = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_annealed_strength_follows_any_schedule(schedule):
    """W_{t+1} = W_t - u_t - s_t (u_t - u_{t-1}), s_t = 1 + (s - 1) lr_t / lr, with gradients of one."""
    p = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = ErrorFeedback([p], partial(torch.optim.SGD, lr=0.1), strength=3.0, anneal=True)
    scheduler = SCHEDULES[schedule](optimizer)
    expected, previous, rates = 0.0, None, set()
    for _ in range(12):
        lr = float(optimizer.param_groups[0]["lr"])
        p.grad = torch.ones_like(p)
        optimizer.step()
        expected -= lr + (0.0 if previous is None else (1 + 2 * lr / 0.1) * (lr - previous))
        previous = lr
        rates.add(lr)
        assert float(p) == pytest.approx(expected, rel=1e-12)
        scheduler.step(*([1.0] if schedule == "plateau" else []))
    assert len(rates) > 5


@pytest.mark.parametrize("more", [2, 1, 4])
def test_delay_compensation_takes_another_delay_in_mid_run(more):
    """By the formula on W_{t-d}, with the d of the day; where W_{t-d} was not kept, the oldest that was."""
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = DelayCompensation([p], partial(torch.optim.SGD, lr=0.1), strength=2.0)
    optimizer.set_delay(2)
    history, kept = [p.detach().clone()], 2
    for t in range(12):
        delay = 2 if t < 5 else more
        if t == 5:
            again = DelayCompensation([p], partial(torch.optim.SGD, lr=0.1), strength=2.0)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # under the delay of 1 that it begins with
            optimizer = again
            optimizer.set_delay(more)
        oldest = history[max(0, t - min(delay, kept))]
        kept = min(delay, kept + 1)
        g = torch.arange(3.0, dtype=torch.float64) + t
        p.grad = g.clone()
        optimizer.step()
        history.append(history[-1] - 0.1 * (g + 2.0 * g * g * (history[-1] - oldest)))
        torch.testing.assert_close(p.detach(), history[-1])


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2].get("source") != "momentum"])
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


@pytest.mark.parametrize("case", CASES)
def test_a_state_loads_without_delay_and_its_buffers_are_dropped(case):
    correction, _, options = CASES[case]
    params = make_params()
    optimizer = correction(params.items(), BASES["adamw"], **options)
    train(optimizer, params, range(3))
    fresh = correction(make_params().items(), BASES["adamw"], **options)
    fresh.set_delay(0)
    fresh.load_state_dict(optimizer.state_dict())
    assert not any(fresh.state_dict()[correction.state_name].get(name) for name in correction.buffer_names)
