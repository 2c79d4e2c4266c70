"""Fabric's emulated delays: ordinary loops follow the rule, those of the pipeline strategies the oracle, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError
from lightning_asyncpp.errors import NonFiniteGradientError
from lightning_asyncpp.fabric import DelayedGradientStrategy
from lightning_asyncpp.optim import ErrorFeedback
from tests.core.cases import Case, make_model
from tests.core.runs import run_oracle
from tests.trainer.pool import Pools

STEPS = 6


def make_net() -> nn.Module:
    """Nothing that a pipeline could cut."""
    torch.manual_seed(0)
    net = nn.Module()
    net.inner, net.outer = nn.Linear(4, 8), nn.Linear(8, 1)
    net.norm = nn.BatchNorm1d(8)
    net.forward = lambda x: net.outer(net.norm(net.inner(x)).tanh())
    return net


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
    return x, x.prod(1, keepdim=True).sin()


def make_optimizer(model: nn.Module, error_feedback: bool = True) -> torch.optim.Optimizer:
    def base(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.02)

    return ErrorFeedback(model.parameters(), base) if error_feedback else base(model.parameters())


class Loop:
    """An ordinary Fabric loop over two batches per update."""

    def __init__(
        self,
        strategy: Any,
        precision: Any = "32-true",
        devices: int = 1,
        error_feedback: bool = True,
        wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    ) -> None:
        self.fabric = L.Fabric(strategy=strategy, devices=devices, accelerator="cpu", precision=precision)
        self.fabric.launch()
        net = wrap(make_net())
        self.model, self.optimizer = self.fabric.setup(net, make_optimizer(net, error_feedback))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.evaluated: list[float] = []

    def loss(self, step: int) -> Tensor:
        x, y = batch(step)
        rank, size = self.fabric.global_rank, self.fabric.world_size
        return F.mse_loss(self.model(x[rank::size]), y[rank::size])

    def train(self, start: int = 0, stop: int = STEPS, max_norm: float | None = 0.5) -> None:
        for t in range(start, stop):
            for part in (2 * t, 2 * t + 1):
                with self.fabric.no_backward_sync(self.model, enabled=part % 2 == 0):
                    self.fabric.backward(self.loss(part))
            if max_norm is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.evaluated.append(self.evaluate())

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(99)
        self.model.train()
        return float(loss)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def by_the_rule(delay_of: Callable[[int], int], start: int = 0) -> tuple[list[Tensor], list[float]]:
    """W_{t+1} = W_t - U(g_t), g_t taken at each parameter's W_{t-d}; and the loss of every W_{t+1}.

    The first ``start`` gradients are taken at W_t, and no later one at weights before W_start.
    """
    net = make_net()
    parameters = list(net.parameters())
    delays = [delay_of(i) for i in range(len(parameters))]
    optimizer = make_optimizer(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    history, evaluated = [[p.detach().clone() for p in parameters]], []

    def load(versions: list[Tensor]) -> None:
        with torch.no_grad():
            for p, version in zip(parameters, versions):
                p.copy_(version)

    for t in range(STEPS):
        optimizer.set_delay(0 if t < start else dict(zip(parameters, delays)))
        load([history[t if t < start else max(t - d, start)][i] for i, d in enumerate(delays)])
        for part in (2 * t, 2 * t + 1):
            x, y = batch(part)
            F.mse_loss(net.forward(x), y).backward()
        load(history[t])
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        history.append([p.detach().clone() for p in parameters])
        net.eval()
        x, y = batch(99)
        evaluated.append(float(F.mse_loss(net.forward(x), y)))
        net.train()
    return history[-1], evaluated


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_without_delay_it_is_bitwise_fabrics_own_loop(precision: str) -> None:
    plain = Loop("auto", precision, error_feedback=False)
    emulated = Loop(DelayedGradientStrategy(delay=0), precision)
    plain.train()
    emulated.train()
    assert_equal(emulated.weights, plain.weights)
    assert emulated.evaluated == plain.evaluated


@pytest.mark.parametrize(("delay", "start"), [(1, 0), (3, 0), (1, 3), (2, 2)])
def test_an_ordinary_loop_follows_the_rule(delay: int, start: int) -> None:
    loop = Loop(DelayedGradientStrategy(delay=delay, synchronous_start=start))
    loop.train()
    weights, evaluated = by_the_rule(lambda _: delay, start)
    assert_equal(loop.weights, weights)
    assert loop.evaluated == evaluated  # on the newest weights


def test_pipedreams_delay_follows_the_rule() -> None:
    loop = Loop(DelayedGradientStrategy(delay="pipedream", stages=3))
    loop.train()
    assert_equal(loop.weights, by_the_rule(lambda index: 2 - index // 2)[0])


@pytest.mark.parametrize(("delay", "start"), [(1, 0), (2, 0), (2, 1), (1, 3), (1, 4)])
def test_a_loaded_run_goes_on_as_the_uninterrupted_one(delay: int, start: int, tmp_path: Path) -> None:
    whole = Loop(DelayedGradientStrategy(delay=delay, synchronous_start=start))
    whole.train(stop=3)
    whole.fabric.save(tmp_path / "run.ckpt", whole.state)
    whole.train(start=3)
    resumed = Loop(DelayedGradientStrategy(delay=delay, synchronous_start=start))
    nn.init.zeros_(resumed.model.inner.weight)
    assert resumed.fabric.load(tmp_path / "run.ckpt", resumed.state) == {}
    resumed.train(start=3)
    assert_equal(resumed.weights, whole.weights)
    assert torch.load(tmp_path / "run.ckpt", weights_only=True)["delayed_gradient"]["delay"] == delay
    other = Loop(DelayedGradientStrategy(delay=4))
    with pytest.raises(ConfigurationError, match=f"written with delay={delay}, this run has 4"):
        other.fabric.load(tmp_path / "run.ckpt", other.state)


def test_loading_weights_alone_makes_all_versions_equal(tmp_path: Path) -> None:
    first = Loop(DelayedGradientStrategy(delay=2))
    first.train()
    first.fabric.save(tmp_path / "weights.ckpt", {"model": first.model})
    fresh = Loop(DelayedGradientStrategy(delay=2))
    fresh.train(stop=2)
    fresh.fabric.load(tmp_path / "weights.ckpt", {"model": fresh.model})
    assert_equal([p.detach() for p in fresh.model.parameters()], first.weights)
    fresh.model.train()
    fresh.loss(0)
    assert_equal([p.detach() for p in fresh.model.parameters()], first.weights)  # and so are the older ones


def test_loading_another_module_in_mid_run_changes_nothing(tmp_path: Path) -> None:
    undisturbed, loop = (Loop(DelayedGradientStrategy(delay=2)) for _ in range(2))
    teacher = make_net()
    loop.fabric.save(tmp_path / "teacher.ckpt", {"teacher": teacher})
    for run in (undisturbed, loop):
        run.train(stop=3)
        if run is loop:
            run.fabric.load(tmp_path / "teacher.ckpt", {"teacher": teacher})
        run.train(start=3)
    assert_equal(loop.weights, undisturbed.weights)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_model_and_optimizer_may_be_loaded_one_after_the_other(
    order: tuple[str, str], start: int, tmp_path: Path
) -> None:
    whole = Loop(DelayedGradientStrategy(delay=2, synchronous_start=start))
    whole.train(stop=3)
    whole.fabric.save(tmp_path / "run.ckpt", whole.state)
    whole.train(start=3)
    resumed = Loop(DelayedGradientStrategy(delay=2, synchronous_start=start))
    nn.init.zeros_(resumed.model.inner.weight)
    for name in (*order, "scheduler"):
        resumed.fabric.load(tmp_path / "run.ckpt", {name: resumed.state[name]})
    resumed.train(start=3)
    assert_equal(resumed.weights, whole.weights)


def test_a_model_that_is_loaded_later_leaves_the_run_where_it_is(tmp_path: Path) -> None:
    """Only before the first update it may be the rest of the same checkpoint."""
    first = Loop(DelayedGradientStrategy(synchronous_start=2))
    first.train(stop=1)
    first.fabric.save(tmp_path / "early.ckpt", first.state)
    first.train(start=1, stop=4)
    first.fabric.save(tmp_path / "late.ckpt", first.state)
    resumed = Loop(DelayedGradientStrategy(synchronous_start=2))
    resumed.fabric.load(tmp_path / "late.ckpt", resumed.state)
    resumed.train(start=4, stop=5)
    resumed.fabric.load(tmp_path / "early.ckpt", {"model": resumed.model})
    emulator = resumed.fabric.strategy.emulator
    assert (emulator.mini_batch, emulator.optimizer.delay) == (5, 1)


def test_a_compiled_model_follows_the_rule() -> None:
    """Traced, the exchange of weights before a forward would not happen."""
    plain = Loop(DelayedGradientStrategy(delay=2))
    plain.train()
    compiled = Loop(DelayedGradientStrategy(delay=2), wrap=lambda net: torch.compile(net, backend="aot_eager"))
    compiled.train()
    for a, b in zip(compiled.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_closure_whose_gradient_is_no_number_stops_the_loop(delay: int) -> None:
    loop = Loop(DelayedGradientStrategy(delay=delay), error_feedback=False)
    for factor in (1.0, 1.0, float("nan")):
        before = loop.weights

        def closure(factor: float = factor) -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss(0) * factor
            loop.fabric.backward(loss)
            return loss

        if factor == 1.0:
            loop.optimizer.step(closure)
        else:
            with pytest.raises(NonFiniteGradientError, match="mini-batch 2 holds NaN or Inf"):
                loop.optimizer.step(closure)
            assert all(torch.equal(a, b) for a, b in zip(before, loop.weights, strict=True))


def test_a_skipped_update_is_told() -> None:
    loop = Loop(DelayedGradientStrategy(nonfinite_gradients="skip"))
    loop.train(stop=2)
    loop.fabric.backward(loop.loss(0) * float("nan"))
    with pytest.warns(UserWarning, match="mini-batch 2: its gradient holds NaN or Inf; the update was skipped"):
        loop.optimizer.step()


CASES = {
    "plain": Case(4),
    "muon-feedback-clip-schedule": Case(3, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True),
    "accumulate-dropout": Case(3, accumulate=2, dropout=0.2, random_input=True, max_norm=0.3),
    "weights-skip": Case(4, unequal_weights=True, nan_at=1, max_norm=0.3),
    "synchronous": Case(2, delay=0, optimizer="muon", error_feedback=1.0, scheduler=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_of_the_pipeline_strategies_is_bitwise_the_oracle(name: str) -> None:
    case = CASES[name]
    strategy = DelayedGradientStrategy(
        delay=case.delay, micro_batches=case.micro_batches, micro_batch_weight=case.weight,
        nonfinite_gradients="skip" if case.nan_at is not None else "stop",
    )  # fmt: skip
    fabric = L.Fabric(strategy=strategy, devices=1, accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(case.seed, verbose=False)
    model = fabric.setup_module(make_model(case.dropout, case.spare))
    optimizer = fabric.setup_optimizers(case.make_optimizer(list(model.named_parameters())))
    scheduler = case.make_scheduler(optimizer)
    for indices in case.mini_batches:
        for index in indices:
            strategy.training_step(case.step(model), case.batch(index))
        if case.max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    strategy.flush()
    expected = run_oracle(case)[0]
    for name_of, p in model.named_parameters():
        assert torch.equal(p.detach(), torch.as_tensor(expected[name_of.removeprefix("_forward_module.")])), name_of
    model.eval()
    output = strategy.evaluation_step(lambda b: model(b["x"]), case.batch(0))
    with torch.no_grad():
        torch.testing.assert_close(output, model(case.batch(0)["x"]))


@pytest.mark.parametrize("chosen", [None, "before", "own", "exact"])
def test_a_fresh_last_stage_is_clipped_by_the_chosen_norm(chosen: Any) -> None:
    strategy = DelayedGradientStrategy("fresh_last_stage", 2, micro_batches=3, last_stage_norm=chosen)
    fabric = L.Fabric(strategy=strategy, devices=1, accelerator="cpu")
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    first, last = list(model.parameters())[:2], list(model.parameters())[2:]
    before = None
    for t in range(3):
        strategy.training_step(lambda b: F.mse_loss(model(b[0]), b[1]), batch(t))
        fabric.clip_gradients(model, optimizer, max_norm=1e6)  # completes them and changes nothing
        gradients = {p: p.grad.clone() for p in (*first, *last)}
        exact, own = (torch.stack([gradients[p].norm() for p in stage]).norm() for stage in ((*first, *last), last))
        norm = exact if before is None else {"own": own, "exact": exact}.get(chosen, before)  # no delay in the first
        fabric.clip_gradients(model, optimizer, max_norm=0.01)
        for parameters, divisor in ((first, exact), (last, norm)):
            for p in parameters:
                torch.testing.assert_close(p.grad, gradients[p] * 0.01 / divisor, rtol=1e-3, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        before = exact


def train_under_ddp(delay: int | None) -> list[Any]:
    """On this rank of a pool."""
    strategy = "ddp" if delay is None else DelayedGradientStrategy(delay=delay)
    loop = Loop(strategy, devices=torch.distributed.get_world_size(), error_feedback=bool(delay))
    loop.train()
    return [weight.numpy() for weight in loop.weights]


def test_several_processes_without_delay_are_bitwise_ddp(pools: Pools) -> None:
    plain, emulated = pools.run(2, train_under_ddp, None), pools.run(2, train_under_ddp, 0)
    delayed = pools.run(2, train_under_ddp, 2)
    for rank in (0, 1):
        assert all((a == b).all() for a, b in zip(plain[rank], emulated[rank], strict=True))
        assert all((a == b).all() for a, b in zip(delayed[0], delayed[rank], strict=True))
    assert any((a != b).any() for a, b in zip(plain[0], delayed[0], strict=True))
