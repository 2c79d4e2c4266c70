"""A stage's part of an optimizer: hyper-parameters of an earlier time, and state by the whole model's numbers."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_asyncpp.core.stage_optimizer import StageOptimizer
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.optim import ErrorFeedback
from lightning_asyncpp.storage import merged
from tests.helpers.cases import CountingSGD

MAKE: dict[str, Callable[..., Optimizer]] = {
    "adamw": functools.partial(AdamW, lr=0.1),
    "adagrad": functools.partial(Adagrad, lr=0.1),
    "counting": functools.partial(CountingSGD, lr=0.1),
    "feedback": functools.partial(ErrorFeedback, base=functools.partial(AdamW, lr=0.1)),
}


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape))


def parameters() -> list[nn.Parameter]:
    return [parameter(2, 2), parameter(2), parameter(3, 2), parameter(3), parameter(1)]


def groups(held: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices, vectors, and a group that is empty everywhere."""
    return [
        {"params": [p for p in held if p.ndim == 2], "weight_decay": 0.5},
        {"params": [p for p in held if p.ndim == 1], "lr": 0.2},
    ]


def give_gradients(held: list[nn.Parameter], t: int) -> None:
    for index, p in enumerate(held):
        p.grad = torch.sin(torch.arange(p.numel()) + 3.0 * t + index).view_as(p)


def alone(optimizer: Optimizer) -> StageOptimizer:
    return StageOptimizer(optimizer, [p for group in optimizer.param_groups for p in group["params"]])


def one_parameter() -> nn.Parameter:
    only = parameter(2)
    only.grad = torch.ones(2)
    return only


def test_a_step_sees_the_hyper_parameters_of_its_time_and_the_present_comes_back() -> None:
    optimizer = AdamW([{"params": [one_parameter()]}, {"params": [one_parameter()], "lr": 0.5}], lr=0.1)
    stage = alone(optimizer)
    earlier = stage.hyper_parameters()
    optimizer.param_groups[0].update(lr=0.01, betas=(0.1, 0.2))
    optimizer.param_groups[1].update(lr=0.02, later=1)

    def step() -> None:
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        assert "later" not in optimizer.param_groups[1]
        optimizer.step()

    stage.step(earlier, step)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert optimizer.param_groups[0]["betas"] == (0.1, 0.2)
    assert optimizer.param_groups[1]["later"] == 1


def test_hyper_parameters_are_copies() -> None:
    optimizer = SGD([one_parameter()], lr=torch.tensor(0.5))
    optimizer.param_groups[0]["extra"] = {"values": [1]}
    stage = alone(optimizer)
    earlier = stage.hyper_parameters()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.param_groups[0]["extra"]["values"].append(2)
    stage.step(earlier, optimizer.step)
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.5, 1.5]
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    assert earlier[0]["extra"] == {"values": [1]}


CUTS = ([5], [2, 3], [1, 3, 1])


def stages_of(optimizer: Optimizer, held: list[nn.Parameter], counts: list[int]) -> list[StageOptimizer]:
    """All of them around one optimizer, as in one process."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [StageOptimizer(optimizer, held[end - count : end]) for end, count in zip(ends, counts)]


def train(optimizer: Optimizer, stages: list[StageOptimizer], held: list[nn.Parameter], times: range) -> None:
    for t in times:
        give_gradients(held, t)
        present = stages[0].hyper_parameters()
        for stage in stages:
            stage.step(present, optimizer.step)


@pytest.mark.parametrize("counts", CUTS)
@pytest.mark.parametrize("kind", MAKE)
def test_the_state_of_all_stages_is_that_of_the_whole_and_goes_on_anywhere(kind: str, counts: list[int]) -> None:
    """Each stage in a process of its own, with an optimizer that holds nothing of the others."""
    whole = parameters()
    expected = MAKE[kind](groups(whole))
    for t in range(2):
        give_gradients(whole, t)
        expected.step()
    saved = saved_by(kind, counts, range(2))
    plain = MAKE[kind](groups(parameters()))
    plain.load_state_dict(saved)
    torch.testing.assert_close(plain.state_dict(), expected.state_dict(), rtol=0, atol=0)
    weights = [p.detach().clone() for p in whole]
    give_gradients(whole, 2)
    expected.step()
    again = saved_by(kind, counts[::-1], range(2, 3), saved, weights)
    torch.testing.assert_close(again, expected.state_dict(), rtol=0, atol=0)


def saved_by(
    kind: str, counts: list[int], times: range, state: dict[str, Any] | None = None, weights: Any = ()
) -> dict[str, Any]:
    """The merged state of stages that trained by themselves, from a state or from the beginning."""
    parts = []
    for index in range(len(counts)):
        held = parameters()
        for p, value in zip(held, weights):
            p.detach().copy_(value)
        optimizer = MAKE[kind](groups(held))
        stage = stages_of(optimizer, held, counts)[index]
        stage.keep_own()
        own = {id(p) for p in stage.parameters}
        assert all(id(p) in own for group in optimizer.param_groups for p in group["params"])
        assert all(id(p) in own for p in optimizer.state)
        if state is not None:
            stage.load_state_dict(state)
        train(optimizer, [stage], held, times)
        parts.append(stage.state_dict())
        stage.release()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    return reread(merged(parts))


def reread(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_other_groups_are_refused() -> None:
    held = parameters()
    stage = alone(SGD(held, lr=0.1))
    with pytest.raises(ConfigurationError, match=r"groups of \[2, 3\] parameters, but this run's has \[5\]"):
        stage.load_state_dict(SGD(groups(held), lr=0.1).state_dict())


def test_a_shared_parameter_is_saved_by_one_stage_and_loaded_by_all() -> None:
    parts, expected = [], None
    for index in range(2):
        shared, other = parameter(2), parameter(2)
        optimizer = AdamW([shared, other], lr=0.1)
        shared.grad = other.grad = torch.ones(2)
        optimizer.step()
        expected = optimizer.state_dict()
        stage = StageOptimizer(optimizer, [shared, other][: index + 1], [shared] if index else [])
        stage.keep_own()
        parts.append(stage.state_dict())
        assert parts[-1]["state"].keys() == {index}
    again = AdamW([parameter(2), parameter(2)], lr=0.3)
    alone(again).load_state_dict(merged(parts))
    torch.testing.assert_close(again.state_dict(), expected, rtol=0, atol=0)
