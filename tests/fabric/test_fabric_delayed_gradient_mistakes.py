"""What cannot be right in a loop with Fabric's emulated delay is refused, with the mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_asyncpp import ConfigurationError
from lightning_asyncpp.fabric import DelayedGradientStrategy
from tests.fabric.test_fabric_delayed_gradient import Loop, batch, make_net, make_optimizer


def delayed_loop(**options: Any) -> Loop:
    return Loop(DelayedGradientStrategy(**options))


def evaluate_before_backward() -> None:
    loop = delayed_loop()
    loop.train(stop=2)
    loss = loop.loss(0)
    loop.evaluate()
    loop.fabric.backward(loss)


def backward_after_the_update() -> None:
    loop = delayed_loop()
    loop.train(stop=2)
    loss = loop.loss(0)
    loop.optimizer.step()
    loop.fabric.backward(loss)


def forward_of_a_part() -> None:
    loop = delayed_loop()
    loop.train(stop=2)
    loop.fabric.backward(loop.model.module.inner(torch.ones(2, 4)).sum())


def backward_with_micro_batches() -> None:
    loop = delayed_loop(micro_batches=2)
    loop.fabric.backward(loop.loss(0))


def step_without_a_batch() -> None:
    loop = delayed_loop(micro_batches=2)
    loop.optimizer.step()


def training_step_without_micro_batches() -> None:
    loop = delayed_loop()
    loop.fabric.strategy.training_step(lambda b: loop.model(b[0]).sum(), batch(0))


def two_optimizers() -> None:
    loop = delayed_loop()
    loop.fabric.setup_optimizers(make_optimizer(loop.model))


def two_models() -> None:
    loop = delayed_loop()
    loop.fabric.setup_module(make_net())


def optimizer_first() -> None:
    fabric = L.Fabric(strategy="delayed_gradient", devices=1, accelerator="cpu")
    fabric.launch()
    fabric.setup_optimizers(make_optimizer(make_net()))


def wrong_arguments() -> None:
    DelayedGradientStrategy(delay=-1, micro_batches=0)


def reserved_name() -> None:
    loop = delayed_loop()
    loop.fabric.save("nowhere", {"delayed_gradient": 1})


MISTAKES: dict[Callable[[], None], str] = {
    evaluate_before_backward: "run for evaluation between a training forward and its backward",
    backward_after_the_update: "fabric.backward() without a training forward since the last update",
    forward_of_a_part: "fabric.backward() without a training forward since the last update",
    backward_with_micro_batches: "strategy.training_step(step_fn, batch) runs the backward passes itself",
    step_without_a_batch: "optimizer.step() was called without a batch",
    training_step_without_micro_batches: "give the strategy micro_batches",
    two_optimizers: "a second optimizer was set up",
    two_models: "a second model was set up",
    optimizer_first: "the optimizer was set up before the model",
    wrong_arguments: "2 problems",
    reserved_name: "the state has an entry 'delayed_gradient'",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_named(mistake: Callable[[], None]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mistake()
    assert MISTAKES[mistake] in str(caught.value)


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_what_a_pipeline_refuses_while_an_update_is_applied(micro_batches: int | None, tmp_path: Path) -> None:
    loop = delayed_loop(micro_batches=micro_batches)
    strategy, path, told = loop.fabric.strategy, str(tmp_path / "x.ckpt"), []
    tries: list[Callable[[], object]] = [
        lambda: loop.fabric.save(path, loop.state),
        lambda: loop.fabric.save(path, {"model": loop.model}),
        lambda: loop.fabric.load(path, loop.state),
    ]
    if micro_batches is not None:
        tries.append(lambda: strategy.evaluation_step(lambda b: loop.model(b[0]), batch(0)))  # type: ignore[attr-defined]

    def meet(*_: object) -> None:
        for attempt in tries:
            with pytest.raises(RuntimeError, match=r"while an update is applied.*after optimizer\.step"):
                attempt()
            told.append(attempt)

    loop.optimizer.optimizer.register_step_pre_hook(meet)
    loop.optimizer.optimizer.register_step_post_hook(meet)
    if micro_batches is None:
        loop.train(stop=2)
    else:
        strategy.training_step(lambda b: loop.model(b[0]).sum(), batch(0))  # type: ignore[attr-defined]
        loop.optimizer.step()
    assert len(told) == (12 if micro_batches is None else 8)
    loop.fabric.save(path, loop.state)
